"""Names of tokens that a state lacks or has twice, on exact data, in which columns of a state are their values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..families.recurrent.data import StateStepData

__all__ = ["token_text"]


def token_text(
    data: StateStepData, got: torch.Tensor, want: torch.Tensor, layer: int, request: int, head: int, key: int
) -> str:
    """Describe what a wrong column of a state [L, B, Hv, V, K] holds: the token that is missing, or that is there."""
    held, right = got[layer, request, head, :, key].double(), want[layer, request, head, :, key]
    before = data.states[layer, request, head, :, key].double()
    own = list(_values(data, layer, request, head, key))
    summed = data.layers[0].kind in ("mamba", "lightning")
    for token, value in reversed(own):
        if summed and _same(held, right - value):
            return f"token {token} of request {request} was not applied to its state"
        if summed and _same(held, right + value):
            return f"token {token} of request {request} was applied twice to its state"
    for place, (token, value) in enumerate(own[:-1] if not summed else []):
        if _same(held, value):
            lost = own[place + 1][0]
            return f"token {lost} of request {request} was not applied to its state: it holds that of token {token}"
    if own and _same(held, before):
        which = f"token {own[0][0]}" if len(own) == 1 else f"tokens {', '.join(str(token) for token, _ in own)}"
        return f"{which} of request {request} {'was' if len(own) == 1 else 'were'} not applied to its state"
    for other in range(len(data.news)):
        for token, value in _values(data, layer, other, head, key) if other != request else ():
            if _same(held, value if not summed else right + value):
                return f"token {token} of request {other} was applied to the state of request {request}"
    return f"column {key} of request {request}'s state holds no value of a token"


def _same(held: torch.Tensor, value: torch.Tensor) -> bool:
    return bool(((held - value).abs() <= 0.5).all())


def _values(data: StateStepData, layer: int, request: int, head: int, key: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Tokens of a request that wrote a column, by their position, and what they wrote [V] float64."""
    assert data.unit_keys is not None
    of_layer = data.layers[layer]
    keys, wide = of_layer.k_heads * of_layer.k_dim, of_layer.v_dim
    first = (0 if of_layer.kind == "mamba" else 2 * keys) + head * wide
    group = head * of_layer.k_heads // of_layer.v_heads
    for row in (data.row_request == request).nonzero().flatten().tolist()[: data.kept[request]]:
        if int(data.unit_keys[layer, row, group]) == key:
            value = data.q[layer, row, first : first + wide].double()
            factor = data.k[layer, row, head].double() if of_layer.kind == "mamba" else 1.0
            yield int(data.positions[row]), value * factor
