"""A kernel with the interface of SGLang's and LightLLM's: keys by slot, through ``kv_indptr`` and ``kv_indices``. It is
plain torch, uses neither pages nor rows of a request table, and imports nothing from the kit.
"""

from __future__ import annotations

import torch


def store_slots(
    k: torch.Tensor, v: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, loc: torch.Tensor,
    k_scale: torch.Tensor, v_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Store rows k and v [T, Hk, D] in slots ``loc`` [T] of the buffers [slots, Hk, D], divided by [1] float32
    scales."""
    for rows, buffer, scale in ((k, k_buffer, k_scale), (v, v_buffer, v_scale)):
        if buffer.dtype.itemsize == 1:
            most = torch.finfo(buffer.dtype).max
            rows = (rows.float() / scale).clamp(-most, most).to(buffer.dtype)
            rows, buffer = rows.view(torch.uint8), buffer.view(torch.uint8)
        buffer.index_put_((loc,), rows)


def attend_slots(
    q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, sm_scale: float, k_scale: torch.Tensor, v_scale: torch.Tensor,
    sliding_window_size: int = -1, logit_cap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of q [T, Hq, D] over the slots of each request, aligned to the end: [T, Hq, D].

    Buffers are [slots, Hk, D]; ``kv_indices`` [n] may be longer than ``kv_indptr[-1]``. A window of W shows W + 1 keys.
    """
    requests, out = len(kv_indptr) - 1, torch.zeros_like(q)
    offset, most = torch.arange(len(kv_indices) // requests, device=q.device), len(kv_indices) - 1
    row, scales = torch.arange(len(q), device=q.device), (k_scale, v_scale)
    for request in range(requests):  # a program of the grid
        first, end = qo_indptr[request], qo_indptr[request + 1]
        start, count = kv_indptr[request], kv_indptr[request + 1] - kv_indptr[request]
        slots = kv_indices[(start + offset).clamp(max=most)]
        behind = (count - (end - row))[:, None] - offset
        seen = behind >= 0
        if sliding_window_size >= 0:
            seen &= behind <= sliding_window_size
        k, v = (read_rows(buffer, slots) * scale for buffer, scale in zip((k_buffer, v_buffer), scales, strict=True))
        mine = (row >= first) & (row < end)
        # Slots that nobody sees hold anything, and 0 * NaN is NaN.
        v = v.masked_fill(~(seen & mine[:, None]).any(0)[:, None, None], 0.0)
        result = attend(q, k, v, seen, sm_scale, logit_cap, sinks)
        out = torch.where(mine[:, None, None], result.to(q.dtype), out)
    return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sm_scale: float,
    logit_cap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend one request in float32: q [T, Hq, D] on k and v [n, Hk, D], masked by ``seen`` [T, n]."""
    heads = k.shape[1]
    logits = torch.einsum("thgd,nhd->thgn", q.reshape(len(q), heads, -1, q.shape[-1]).float(), k) * sm_scale
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, heads, -1, 1).expand(*logits.shape[:-1], 1)], -1)
    p = torch.softmax(logits, -1).nan_to_num()[..., : len(k)]
    return torch.einsum("thgn,nhd->thgd", p, v).flatten(1, 2)


def read_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``buffer[slots]`` in float32; indexing is not implemented for FP8 everywhere, so its bytes are gathered."""
    if buffer.dtype.itemsize > 1:
        return buffer[slots].float()
    return buffer.view(torch.uint8)[slots].view(buffer.dtype).float()
