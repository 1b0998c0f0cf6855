"""Attention in float64, from a case's own tensors. The only definition of right in the kit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..cases.data import StepData
from ..contract import AttentionLayer

__all__ = ["Attention", "attend", "windowed"]


@dataclass(frozen=True)
class Attention:
    """Result for every live row, [L, T, Hq, Dv] float64 unless said otherwise."""

    out: torch.Tensor
    """The answer."""
    mass: torch.Tensor
    """Sum of p_j |v_j|: what rounding errors of P and of partial sums scale with."""
    logit_noise: torch.Tensor
    """[L, T, Hq, 1]: how far float32 arithmetic may move a logit, at most."""
    keys: torch.Tensor
    """[T] int64: keys each row may see, without windows."""
    flat: torch.Tensor | None = None
    """Sum of |v_j| over the visible keys, times the weight of a logit as large as the row's largest: what the absolute
    error of small probabilities scales with. None unless asked for."""


def windowed(visible: torch.Tensor, data: StepData, window: int) -> torch.Tensor:
    """Narrow [B, Tmax, S] bool visibility to keys at positions p - window .. p. -1: no window, the same tensor."""
    if window < 0:
        return visible
    return visible & (data.key_positions[:, None, :] >= data.query_positions[:, :, None] - window)


def attend(
    data: StepData, layers: Sequence[AttentionLayer], visible: torch.Tensor | None = None, *, flat: bool = False
) -> Attention:
    """Attention of all layers of a step on the keys and values as the pool holds them.

    ``visible`` [B, Tmax, S] replaces the case's own visibility (to ask what a dropped key would do). ``flat``: compute
    ``Attention.flat`` too.
    """
    visible = data.visible if visible is None else visible
    if data.stored_keys.numel() + data.q[..., 0].numel() * visible.shape[-1] <= _AT_ONCE:
        return _attend(data, layers, visible, flat)
    # One layer and one request at a time: nothing is computed on the padding behind short requests, and what is needed
    # for a moment stays small.
    by_layer = []
    for index, layer in enumerate(layers):
        parts = [_part(data, visible, index, request) for request in range(len(visible))]
        by_layer.append(_joined([_attend(part, [layer], part.visible, flat) for part in parts], 1))
    return replace(_joined(by_layer, 0), keys=by_layer[0].keys)


_AT_ONCE = 1 << 17
"""Numbers in a step's keys and logits up to which all of it is computed at once."""


def _part(data: StepData, visible: torch.Tensor, layer: int, request: int) -> StepData:
    """One request in one layer, cut to the keys that it may see. What attention does not look at stays whole."""
    visible = visible[request : request + 1]
    seen = visible[0].any(0).nonzero()
    keys = slice(0, int(seen[-1]) + 1 if len(seen) else 1)
    mine, one, this = data.row_request == request, slice(request, request + 1), slice(layer, layer + 1)
    return replace(
        data,
        q=data.q[this, mine],
        stored_keys=data.stored_keys[this, one, keys],
        stored_values=None if data.stored_values is None else data.stored_values[this, one, keys],
        kv_scales=data.kv_scales[:, this],
        visible=visible[..., keys],
        key_positions=data.key_positions[one, keys],
        query_positions=data.query_positions[one],
        row_request=torch.zeros_like(data.row_request[mine]),
        row_offset=data.row_offset[mine],
    )


def _joined(parts: Sequence[Attention], dim: int) -> Attention:
    """Parts of a step side by side: layers along dimension 0, rows along dimension 1."""
    flat = [part.flat for part in parts if part.flat is not None]
    return Attention(
        out=torch.cat([part.out for part in parts], dim),
        mass=torch.cat([part.mass for part in parts], dim),
        logit_noise=torch.cat([part.logit_noise for part in parts], dim),
        keys=torch.cat([part.keys for part in parts]),
        flat=torch.cat(flat, dim) if flat else None,
    )


def _attend(data: StepData, layers: Sequence[AttentionLayer], visible: torch.Tensor, flat: bool) -> Attention:
    num_layers, _, num_q_heads, dim = data.q.shape
    bs, widest, _ = visible.shape
    kv_heads = data.stored_keys.shape[3]
    b, t = data.row_request, data.row_offset
    q = torch.zeros(num_layers, bs, widest, num_q_heads, dim, dtype=torch.float64)
    q[:, b, t] = data.q.double()
    q = q.view(num_layers, bs, widest, kv_heads, -1, dim)
    scaling = torch.tensor([layer.scaling for layer in layers], dtype=torch.float64).view(-1, 1, 1, 1, 1, 1)
    # [L, B, Hk, G * Tmax, S]: one matrix product for each KV head of each request.
    rows = q.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
    keys = data.keys.permute(0, 1, 3, 2, 4)
    grouped = (num_layers, bs, kv_heads, num_q_heads // kv_heads, widest, -1)
    logits = (rows @ keys.transpose(-1, -2)).view(grouped).mul_(scaling)
    noise = (_norm(rows) * _norm(keys).amax(3, keepdim=True)).view(grouped) * scaling
    for index, layer in enumerate(layers):
        if layer.logit_cap:
            logits[index] = layer.logit_cap * torch.tanh(logits[index] / layer.logit_cap)
    seen = torch.stack([windowed(visible, data, layer.sliding_window_size) for layer in layers])
    logits.masked_fill_(~seen[:, :, None, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    sinks = _sinks(layers, kv_heads)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.clamp(min=-1e300)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    p = weights.div_(total).flatten(3, 4)
    values = data.values.permute(0, 1, 3, 2, 4)

    def packed(padded: torch.Tensor) -> torch.Tensor:
        """[L, B, Hk, G * Tmax, X] -> [L, T, Hq, X]."""
        return padded.view(grouped).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)[:, b, t]

    out, everything = packed(p @ values), None
    sizes = values.abs()
    if flat:
        even = seen[:, :, None, None].expand(grouped[:5] + seen.shape[-1:]) / total
        everything = packed(even.flatten(3, 4) @ sizes)
    return Attention(
        out=out,
        mass=packed(p @ sizes),
        logit_noise=packed(noise.flatten(3, 4)),
        keys=visible.sum(-1)[b, t],
        flat=everything,
    )


def _norm(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norm


def _sinks(layers: Sequence[AttentionLayer], kv_heads: int) -> torch.Tensor | None:
    """[L, 1, Hk, G, 1, 1], or None."""
    if layers[0].sinks is None:
        return None
    stacked = torch.stack([layer.sinks for layer in layers if layer.sinks is not None]).double().cpu()
    return stacked.view(len(layers), 1, kv_heads, -1, 1, 1)
