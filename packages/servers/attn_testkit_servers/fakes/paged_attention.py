"""Attention over paged keys in torch, of fixed shapes and device work only, so that it may be captured.

The fakes of vendor kernels compute with it: float32 accumulation, probabilities rounded to the dtype of the kernel's
second product. Shapes depend only on the capacity of the buffers, never on lengths: lengths are read on the device at
every replay, as in kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Query rows of a packed batch. R rows, some past the last request."""

    request: torch.Tensor
    """[R] int64, clamped into the batch."""
    offset: torch.Tensor
    """[R] int64: row inside its request."""
    valid: torch.Tensor
    """[R] bool."""


@dataclass(frozen=True)
class Keys:
    """Key slots of all requests, one after another. S slots, some of them past a request's length."""

    request: torch.Tensor
    """[S] int64, clamped into the batch."""
    offset: torch.Tensor
    """[S] int64: position of the key inside its request."""
    valid: torch.Tensor
    """[S] bool."""
    slot: torch.Tensor
    """[S] int64: place in the pages, flat; 0 if it is not valid."""


def rows_of_requests(indptr: torch.Tensor, count: int) -> Rows:
    """``indptr`` [bs + 1] int32 on the device, ``count`` rows of q."""
    bounds = indptr.long()
    row = torch.arange(count, device=indptr.device)
    request = (torch.searchsorted(bounds, row, right=True) - 1).clamp(0, bounds.shape[0] - 2)
    return Rows(request, row - bounds[request], row < bounds[-1])


def keys_of_pages(indptr: torch.Tensor, pages: torch.Tensor, lens: torch.Tensor, page_size: int) -> Keys:
    """``indptr`` [bs + 1] int32 in pages, ``pages`` [capacity] int32 page ids, ``lens`` [bs] int: keys of a request."""
    bounds = indptr.long() * page_size
    at = torch.arange(pages.shape[0] * page_size, device=pages.device)
    request = (torch.searchsorted(bounds, at, right=True) - 1).clamp(0, bounds.shape[0] - 2)
    offset = at - bounds[request]
    # Offsets of a part of a batch do not begin at 0: what is before them belongs to another request.
    valid = (offset >= 0) & (at < bounds[-1]) & (offset < lens.long()[request])
    # Entries of the table past a request may be any page id, or no page id at all.
    slot = pages.long()[at // page_size] * page_size + at % page_size
    return Keys(request, offset, valid, torch.where(valid, slot, 0))


@dataclass(frozen=True)
class Packed:
    """Query rows and paged keys of a packed batch, and which of them meet."""

    rows: Rows
    keys: Keys
    ahead: torch.Tensor
    """[R, S] int64: position of each key, counted from the row's own."""
    seen: torch.Tensor
    """[R, S] bool."""


def packed(
    cu_seqlens_q: torch.Tensor,
    rows_of_q: int,
    lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    window: tuple[int, int],
) -> Packed:
    """A batch as FlashAttention has it: rows aligned to the end of their keys, seen from ``window[0]`` before a row to
    ``window[1]`` after it, without a bound if negative."""
    bs, blocks = page_table.shape
    bounds = torch.arange(bs + 1, dtype=torch.int32, device=page_table.device) * blocks
    rows = rows_of_requests(cu_seqlens_q, rows_of_q)
    keys = keys_of_pages(bounds, page_table.reshape(-1), lens, page_size)
    seen = (rows.request[:, None] == keys.request[None]) & keys.valid[None] & rows.valid[:, None]
    last = (lens.long() - cu_seqlens_q.diff().long())[rows.request] + rows.offset
    ahead = keys.offset[None] - last[:, None]
    before, after = window
    if after >= 0:
        seen = seen & (ahead <= after)
    if before >= 0:
        seen = seen & (ahead >= -before)
    return Packed(rows, keys, ahead, seen)


def gather(cache: torch.Tensor, keys: Keys, heads_first: bool = False) -> torch.Tensor:
    """[pages, P, Hk, D] (or [pages, Hk, P, D]) in any dtype -> [S, Hk, D] float32, zero if no key is valid.

    As kernels do, whose loads past a length leave zeros in shared memory: so a NaN there has no effect.
    """
    if heads_first:
        cache = cache.transpose(1, 2)
    page = cache.shape[1]
    small = cache.dtype.itemsize == 1
    # index_select is not implemented for FP8 everywhere; the bytes are what is loaded.
    source = cache.view(torch.uint8) if small else cache
    taken = source[keys.slot // page, keys.slot % page]
    rows = (taken.view(cache.dtype) if small else taken).float()
    return rows.masked_fill(~keys.valid[:, None, None], 0.0)


def causal(rows: Rows, keys: Keys, q_lens: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
    """[R, S] bool: aligned to the end, row j of n sees the first kv_len - n + j + 1 keys."""
    last = kv_lens.long()[rows.request] - q_lens.long()[rows.request] + rows.offset
    return keys.offset[None] <= last[:, None]


def windowed(
    rows: Rows, keys: Keys, q_lens: torch.Tensor, kv_lens: torch.Tensor, window_left: int
) -> torch.Tensor | None:
    """[R, S] bool: the last ``window_left`` + 1 keys up to the row's own place, by row and not by tree depth."""
    if window_left < 0:
        return None
    last = kv_lens.long()[rows.request] - q_lens.long()[rows.request] + rows.offset
    return keys.offset[None] + window_left >= last[:, None]


def mask_bits(
    packed: torch.Tensor, starts: torch.Tensor, rows: Rows, keys: Keys, kv_lens: torch.Tensor
) -> torch.Tensor:
    """[R, S] bool from packed bits: ``packed`` uint8 bytes, little-endian; ``starts`` [bs + 1] int32 in bytes.

    Bit of (row, key) is ``row * kv_len + key`` after its request's first byte: rows are not aligned to bytes.
    """
    if not len(packed):
        # No request of the batch has a key: nothing is read.
        return torch.zeros(rows.request.shape[0], keys.request.shape[0], dtype=torch.bool, device=packed.device)
    bit = rows.offset[:, None] * kv_lens.long()[rows.request][:, None] + keys.offset[None]
    byte = (starts.long()[rows.request][:, None] + bit // 8).clamp(0, packed.shape[0] - 1)
    return (packed[byte].long() >> (bit % 8)) & 1 != 0


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
    round_to: torch.dtype | None = None,
    factor: float = 1.0,
    sinks: torch.Tensor | None = None,
    loaded: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [R, Hq, Dqk], ``keys`` [S, Hk, Dqk], ``values`` [S, Hk, Dv] float32, ``visible`` [R, S].

    Returns float32 outputs [R, Hq, Dv] and the log2 of each softmax's sum [R, Hq]; rows that see nothing get 0 and
    -inf. ``round_to``: dtype of the probabilities in the second product, which ``factor`` multiplies before they are
    rounded. ``sinks`` [Hq] float32: one more logit a head.
    ``loaded`` [R, S]: the keys that the kernel multiplies with, visible or not (default: ``visible``). A loaded value
    that is NaN or infinite spoils its row, as 0 * NaN does in the kernel; a value of another request never does.
    ``bias`` [Hq, R, S]: added to the logits after the soft cap.
    """
    rows, q_heads, _ = q.shape
    kv_heads = keys.shape[1]
    grouped = q.float().reshape(rows, kv_heads, q_heads // kv_heads, -1).permute(1, 0, 2, 3).flatten(1, 2)
    logits = grouped @ keys.permute(1, 2, 0) * scale
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.view(kv_heads, rows, q_heads // kv_heads, -1)
    if bias is not None:
        logits = logits + bias.view(kv_heads, q_heads // kv_heads, rows, -1).transpose(1, 2)
    hidden = ~visible[None, :, None, :]
    logits = logits.masked_fill(hidden, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    extra = None if sinks is None else sinks.float().view(kv_heads, 1, -1, 1)
    if extra is not None:
        top = torch.maximum(top, extra)
    top = torch.where(top.isinf(), 0.0, top)
    p = torch.exp(logits - top)
    total = p.sum(-1, keepdim=True)
    if extra is not None:
        total = total + torch.exp(extra - top)
    if round_to is not None:
        p = (p * factor).to(round_to).float() / factor
    # All requests share one product here, and a value of another request must not meet this row's zeros.
    usable = values.isfinite()
    out = p.flatten(1, 2) @ torch.where(usable, values, 0.0).permute(1, 0, 2)
    out = out.view(kv_heads, rows, q_heads // kv_heads, -1) / torch.where(total == 0, 1.0, total)
    spoilt = (visible if loaded is None else loaded).float() @ (~usable.all(-1)).float()
    out = out.masked_fill((spoilt > 0).t()[:, :, None, None], torch.nan)
    lse = (top + total.log()) * 1.4426950408889634
    return out.permute(1, 0, 2, 3).flatten(1, 2), lse.squeeze(-1).permute(1, 0, 2).flatten(1, 2)
