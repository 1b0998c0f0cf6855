"""Names of tokens that are missing in a state or applied twice, on exact data, where columns of a state are values of
tokens.

A state shows the last token of each key only, if values are overwritten. Outputs show tokens that were lost earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..families.recurrent.data import StateStepData
from ..families.recurrent.recurrence import gates_of_rows, recur, start_of


def token_text(
    data: StateStepData, got: torch.Tensor, want: torch.Tensor, before: torch.Tensor, at: tuple[int, int, int, int]
) -> str:
    """Describe the contents of a wrong column of a state: the token that is missing, or the token that it holds.

    ``got``, ``want``, ``before``: [L, E, state_heads, V, K]. ``at``: layer, end, matrix of the slot and key of the
    column.
    """
    layer, end, place, key = at
    # In log-linear attention a slot has the heads of each level.
    head = place % data.layers[layer].v_heads
    if data.has_gates and data.ends[end].rows:
        return _gate_text(data, (layer, end, head, key))
    held, right, old = (each[layer, end, place, :, key].double() for each in (got, want, before))
    request, rows = data.ends[end].request, data.ends[end].rows
    every = list(_values(data, layer, request, head, key))
    path = set(data.path(request, rows))
    own = [(token, value) for row, token, value in every if row in path]
    rejected = [(token, value) for row, token, value in every if row not in path]
    summed = not data.layers[0].of_kind.overwrites
    of = f"of request {request}"
    for token, value in reversed(own):
        if summed and _same(held, right - value):
            return f"token {token} {of} was not applied to its state"
        if summed and _same(held, right + value):
            return f"token {token} {of} was applied twice to its state"
    for place, (token, value) in enumerate(own[:-1] if not summed else []):
        if _same(held, value):
            lost = own[place + 1][0]
            return f"token {lost} {of} was not applied to its state: it holds that of token {token}"
    so_far = right
    for token, value in rejected:
        so_far = so_far + value if summed else value
        if _same(held, so_far):
            if rows < data.kept[request]:
                return f"token {token} of request {request} comes after the chunk that its copied state ends with"
            return f"a rejected draft token was applied to the state of request {request}: token {token}"
    if own and _same(held, old):
        which = f"token {own[0][0]}" if len(own) == 1 else f"tokens {', '.join(str(token) for token, _ in own)}"
        return f"{which} {of} {'was' if len(own) == 1 else 'were'} not applied to its state"
    for other in range(len(data.news)):
        for _, token, value in _values(data, layer, other, head, key) if other != request else ():
            if _same(held, value if not summed else right + value):
                return f"token {token} of request {other} was applied to the state of request {request}"
    return f"column {key} of request {request}'s state holds the value of no token"


def _gate_text(data: StateStepData, at: tuple[int, int, int, int]) -> str:
    """Describe a wrong column of data in which one row of each head decays differently from all others."""
    layer, end, head, key = at
    request, rows = data.ends[end].request, data.ends[end].rows
    mine = (data.row_request == request).nonzero().flatten()[:rows]
    decays = gates_of_rows(data.layers[layer], layer, data)[0][mine, head]
    decays = decays[:, key if decays.shape[1] > 1 else 0]
    row = int(decays.argmin())
    return (
        f"column {key} of request {request}'s state is not what its tokens leave: the decay of token "
        f"{int(data.positions[mine[row]])} (row {row} of the request) is {round(float(decays[row]), 2):g}, "
        "and that of all other tokens is 1"
    )


def read_text(data: StateStepData, outputs: Sequence[torch.Tensor]) -> tuple[str, tuple[int, int, int]] | None:
    """Name a token that is missing in the outputs of a layer, or applied too early, with layer, row and head. None if
    there is none. Only for kinds that overwrite: in others every token remains in the state.
    """
    if data.asked_keys is None or data.has_gates or not data.layers[0].of_kind.overwrites or not len(outputs):
        return None
    want = recur(data)
    out = torch.stack([each.reshape(want.out.shape[1:]) for each in outputs])
    error = (out.double() - want.out).nan_to_num(0.0)
    normalizes = data.layers[0].of_kind.normalizes
    size = data.layers[0].k_dim ** -0.5 if normalizes else 1.0
    wrong = (error.abs() > torch.maximum(want.out_limit, torch.tensor(0.5 * size * 2**-0.5))).any(-1)
    for layer, row, head in wrong.nonzero().tolist()[:_MOST_TRIED]:
        of_layer = data.layers[layer]
        first, second = data.asked_keys[layer, row, head * of_layer.k_heads // of_layer.v_heads].tolist()
        off = error[layer, row, head] / size
        if normalizes:
            off = off * (1.0 if first == second else 2**0.5)
        elif first == second:
            # A query that is not divided by its length has that key twice.
            off = off / 2
        for key in dict.fromkeys((first, second)):
            found = _misread(data, layer, row, head, key, off)
            if found:
                return found, (layer, row, head)
    return None


_MOST_TRIED = 64
"""Wrong rows that are asked about."""


def _misread(data: StateStepData, layer: int, row: int, head: int, key: int, off: torch.Tensor) -> str:
    """Name the token that a row reads instead of the last value of a key. ``off`` [V]: difference from that value."""
    request, offset = int(data.row_request[row]), int(data.row_offset[row])
    every = list(_values(data, layer, request, head, key))
    path = set(data.path(request, offset + 1))
    so_far = [each for each in every if each[0] in path]
    column = start_of(data).states[layer, request, head, :, key].double()
    right = so_far[-1][2] if so_far else column
    reader = f"the row of token {int(data.positions[row])}"
    for place, token, value in every:
        if value is not right and _same(right + off, value, 1.0):
            if place > offset:
                return f"token {token} of request {request} was applied before {reader} was read"
            lost = next((later for at, later, _ in so_far if at > place), token)
            return f"token {lost} of request {request} was not applied to its state: {reader} reads token {token}"
    if so_far and _same(right + off, column, 1.0):
        return f"token {so_far[0][1]} of request {request} was not applied to its state before {reader} was read"
    return ""


def _same(held: torch.Tensor, value: torch.Tensor, unit: float = 0.5) -> bool:
    return bool(((held - value).abs() <= unit).all())


def _values(
    data: StateStepData, layer: int, request: int, head: int, key: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Tokens of a request that wrote a column: row of the request, position, and the written value [V] float64."""
    assert data.unit_keys is not None
    of_layer = data.layers[layer]
    keys, wide = of_layer.k_heads * of_layer.k_dim, of_layer.v_dim
    first = keys * of_layer.of_kind.value_part + head * wide
    group = head * of_layer.k_heads // of_layer.v_heads
    rows = (data.row_request == request).nonzero().flatten()
    wrote = (data.unit_keys[layer, rows, group] == key).nonzero().flatten().tolist()
    for place in wrote:
        row = int(rows[place])
        value = data.q[layer, row, first : first + wide].double()
        factor = data.k[layer, row, head].double() if of_layer.of_kind.steps else 1.0
        yield place, int(data.positions[row]), value * factor
