"""Names of tokens that a state lacks or has twice, on exact data, in which columns of a state are their values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..families.recurrent.data import StateStepData

__all__ = ["token_text"]


def token_text(
    data: StateStepData, got: torch.Tensor, want: torch.Tensor, before: torch.Tensor, at: tuple[int, int, int, int]
) -> str:
    """Describe what a wrong column of a state holds: the token that is missing, or that is there.

    ``got``, ``want``, ``before``: [L, E, Hv, V, K]. ``at``: layer, end, head and key of the column.
    """
    layer, end, head, key = at
    held, right, old = (each[layer, end, head, :, key].double() for each in (got, want, before))
    request, rows = data.ends[end].request, data.ends[end].rows
    every = list(_values(data, layer, request, head, key))
    own = [(token, value) for row, token, value in every if row < rows]
    rejected = [(token, value) for row, token, value in every if row >= rows]
    summed = data.layers[0].kind in ("mamba", "lightning")
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
    return f"column {key} of request {request}'s state holds no value of a token"


def _same(held: torch.Tensor, value: torch.Tensor) -> bool:
    return bool(((held - value).abs() <= 0.5).all())


def _values(
    data: StateStepData, layer: int, request: int, head: int, key: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Tokens of a request that wrote a column: row of the request, position, and what they wrote [V] float64."""
    assert data.unit_keys is not None
    of_layer = data.layers[layer]
    keys, wide = of_layer.k_heads * of_layer.k_dim, of_layer.v_dim
    first = (0 if of_layer.kind == "mamba" else 2 * keys) + head * wide
    group = head * of_layer.k_heads // of_layer.v_heads
    rows = (data.row_request == request).nonzero().flatten()
    wrote = (data.unit_keys[layer, rows, group] == key).nonzero().flatten().tolist()
    for place in wrote:
        row = int(rows[place])
        value = data.q[layer, row, first : first + wide].double()
        factor = data.k[layer, row, head].double() if of_layer.kind == "mamba" else 1.0
        yield place, int(data.positions[row]), value * factor
