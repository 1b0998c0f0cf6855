"""Attention in float64, from a case's own tensors. The only definition of right in the kit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    logits = (rows @ keys.transpose(-1, -2)).view(grouped) * scaling
    noise = (_norm(rows) * _norm(keys).amax(3, keepdim=True)).view(grouped) * scaling
    for index, layer in enumerate(layers):
        if layer.logit_cap:
            logits[index] = layer.logit_cap * torch.tanh(logits[index] / layer.logit_cap)
    seen = torch.stack([windowed(visible, data, layer.sliding_window_size) for layer in layers])
    logits = logits.masked_fill(~seen[:, :, None, None], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    sinks = _sinks(layers, kv_heads)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.clamp(min=-1e300)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    p = (weights / total).flatten(3, 4)
    values = data.values.permute(0, 1, 3, 2, 4)

    def packed(padded: torch.Tensor) -> torch.Tensor:
        """[L, B, Hk, G * Tmax, X] -> [L, T, Hq, X]."""
        return padded.view(grouped).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)[:, b, t]

    everything: torch.Tensor | None = None
    if flat:
        even = seen[:, :, None, None].expand(grouped[:5] + seen.shape[-1:]) / total
        everything = packed(even.flatten(3, 4) @ values.abs())
    return Attention(
        out=packed(p @ values),
        mass=packed(p @ values.abs()),
        logit_noise=packed(noise.flatten(3, 4)),
        keys=visible.sum(-1)[b, t],
        flat=everything,
    )


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return (rows * rows).sum(-1, keepdim=True).sqrt()


def _sinks(layers: Sequence[AttentionLayer], kv_heads: int) -> torch.Tensor | None:
    """[L, 1, Hk, G, 1, 1], or None."""
    if layers[0].sinks is None:
        return None
    stacked = torch.stack([layer.sinks for layer in layers if layer.sinks is not None]).double().cpu()
    return stacked.view(len(layers), 1, kv_heads, -1, 1, 1)
