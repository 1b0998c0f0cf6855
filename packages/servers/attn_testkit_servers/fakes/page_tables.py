"""Attention in torch over a padded page table with one row of pages per request, as TensorRT-LLM-like kernels read it.

Fixed shapes and device work only, so that it may be captured: shapes depend only on the widths of the buffers, and
lengths are read on the device at every replay, as in kernels. Keys are gathered once per request, not once per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class Keys:
    """Keys of each request, by its row of the page table. S = width of the table in slots."""

    rows: torch.Tensor
    """[bs, S, Hk, D] float32: zero past a length (kernels' loads leave zeros there), NaN for an invalid page id."""
    lens: torch.Tensor
    """[bs] int64."""


@dataclass(frozen=True)
class Queries:
    """Packed query rows, padded to the same width for each request."""

    rows: torch.Tensor
    """[bs, n, Hq, D]."""
    lens: torch.Tensor
    """[bs] int64: real rows of each request."""
    starts: torch.Tensor
    """[bs] int64: first row of each request in the packed tensor."""


def gather(cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> Keys:
    """``cache`` [pages, P, Hk, D], any strides and dtype; ``table`` [bs, M] int32; ``lens`` [bs].

    A kernel reads only the pages that a length covers, whatever the table holds after them. A page id outside the pool
    may give any numbers; here it gives NaN.
    """
    pages, page = cache.shape[0], cache.shape[1]
    bs, width = table.shape
    lens = lens.long()
    at = torch.arange(width * page, device=cache.device)
    valid = at[None] < lens[:, None]
    read = valid.view(bs, width, page).any(-1)
    wrong = read & ((table < 0) | (table >= pages))
    chosen = torch.where(read & ~wrong, table, 0).long()
    # index_select is not implemented for FP8 everywhere; the bytes are what is loaded.
    source = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    rows = source[chosen].flatten(1, 2)
    rows = (rows.view(FP8) if cache.dtype == FP8 else rows).float()
    rows = rows.masked_fill(~valid[:, :, None, None], 0.0)
    outside = (wrong[:, :, None] & valid.view(bs, width, page)).flatten(1)
    return Keys(rows.masked_fill(outside[:, :, None, None], torch.nan), lens)


def pad_rows(q: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, width: int) -> Queries:
    """Packed ``q`` [T, Hq, D] -> [bs, width, Hq, D]; rows past a request's own hold whatever is there."""
    starts, lens = starts.long(), lens.long()
    at = starts[:, None] + torch.arange(width, device=q.device)
    # FP8 has no indexing everywhere.
    source = q.view(torch.uint8) if q.dtype == FP8 else q
    rows = source[at.clamp(0, q.shape[0] - 1)]
    return Queries(rows.view(q.dtype), lens, starts)


def pack_rows(padded: torch.Tensor, queries: Queries, out: torch.Tensor) -> None:
    """[bs, n, Hq, Dv] back into ``out`` [T, Hq, Dv]; unowned rows do not change."""
    row = torch.arange(out.shape[0], device=out.device)
    request = (torch.searchsorted(queries.starts, row, right=True) - 1).clamp(min=0)
    offset = row - queries.starts[request]
    mine = (offset < queries.lens[request]) & (offset < padded.shape[1])
    got = padded[request, offset.clamp(0, padded.shape[1] - 1)].to(out.dtype)
    out.copy_(torch.where(mine[:, None, None], got, out))


def visible_causal(queries: Queries, keys: Keys, window_left: int = -1) -> torch.Tensor:
    """[bs, n, S]: aligned to the end, row j of n sees the first ``kv_len - n + j + 1`` keys; at most W + 1 of them."""
    at = torch.arange(keys.rows.shape[1], device=keys.rows.device)
    row = torch.arange(queries.rows.shape[1], device=at.device)
    last = (keys.lens - queries.lens)[:, None, None] + row[:, None]
    seen = (at <= last) & (at < keys.lens[:, None, None])
    return seen & (at >= last - window_left) if window_left >= 0 else seen


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float | torch.Tensor,
    *,
    probabilities: torch.dtype,
    factor: float = FP8_MAX,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q`` [bs, n, Hq, D], ``keys`` [bs, S, Hk, D] and ``values`` [bs, S, Hk, Dv] float32, ``seen`` [bs, n, S].

    Returns [bs, n, Hq, Dv] float32. ``probabilities``: what they are rounded to for the second product; if that is FP8,
    ``factor`` multiplies them before (XQA's ``mha_sm90.cu``: 448). ``sinks`` [Hq] float32. A row that sees nothing is
    0 / 0, as on a GPU.
    """
    bs, n, q_heads, dim = q.shape
    kv_heads = keys.shape[2]
    group = q_heads // kv_heads
    rows = q.float().view(bs, n, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(bs, kv_heads, group * n, dim)
    logits = (rows @ keys.permute(0, 2, 3, 1)) * scale
    hidden = ~seen[:, None, None]
    logits = logits.view(bs, kv_heads, group, n, -1).masked_fill(hidden, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    extra = None
    if sinks is not None:
        extra = sinks.float().view(1, kv_heads, group, 1, 1)
        top = torch.maximum(top, extra)
    p = torch.exp(logits - torch.where(top.isinf(), 0.0, top))
    total = p.sum(-1, keepdim=True)
    if extra is not None:
        total = total + torch.exp(extra - top)
    p = _rounded(p, probabilities, factor).view(bs, kv_heads, group * n, -1)
    out = (p @ values.transpose(1, 2)).view(bs, kv_heads, group, n, -1) / total
    return out.permute(0, 3, 1, 2, 4).reshape(bs, n, q_heads, -1)


def _rounded(p: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """Probabilities are at most 1 here."""
    if dtype == FP8:
        return (p * factor).to(dtype).float() / factor
    return p if dtype == torch.float32 else p.to(dtype).float()


def through_scratch(values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Send float32 results through a kernel's scratch memory, where partial results of splits are between its two
    halves.

    ``scratch``: bytes. Results that do not fit stay in registers. This exposes a workspace that was freed, replaced or
    shared after a capture.
    """
    flat = values.reshape(-1)
    bytes_ = scratch.reshape(-1).view(torch.uint8)
    room = min(flat.numel(), bytes_.numel() // 4)
    place = bytes_[: room * 4].view(torch.float32)
    place.copy_(flat[:room])
    return torch.cat([place, flat[room:]]).view(values.shape)
