"""Attention, in one piece, of rows that have keys of their own: the last part of two parents of the fifth set."""

from __future__ import annotations

import torch
from plain_backends import LOWEST, SMALLEST


def attend_rows(q, k, v, seen, layer, of_fp8):
    """Q [T, H, D], K and V [T, S, KV heads, D], ``seen`` [T, S]; the output [T, H, D] is fp32."""
    t, h, d = q.shape
    group = layer.q_per_kv
    scores = torch.einsum("tkgd,tskd->tkgs", q.float().reshape(t, h // group, group, d), k.float())
    scores = scores * layer.scaling * (layer.k_scale if of_fp8 else 1.0)
    if layer.logit_cap:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    sinks = None if layer.sinks is None else layer.sinks.float().view(1, h // group, group)
    top = scores.amax(-1) if sinks is None else torch.maximum(scores.amax(-1), sinks)
    top = top.clamp(min=LOWEST)
    p = torch.exp(scores - top[..., None])
    total = p.sum(-1) if sinks is None else p.sum(-1) + torch.exp(sinks - top)
    v = v.float().masked_fill(~seen[:, :, None, None], 0.0)
    out = torch.einsum("tkgs,tskd->tkgd", p, v) / total.clamp(min=SMALLEST)[..., None]
    return (out * layer.v_scale if of_fp8 else out).reshape(t, h, -1)


def slices(rows, keys):
    """Of ``rows`` rows, so many at a time that memory for ``keys`` keys of each is small."""
    step = max(1, (1 << 17) // keys)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
