"""Two Triton kernels: attention over a paged KV pool, and the merge of its split-KV partial results.

They run on CUDA and, with ``TRITON_INTERPRET=1`` set before the first import of triton, on a CPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Triton's language, not Python's: their arguments have no Python types.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Tiles:
    """Compile-time sizes of one launch of ``attend_kernel``."""

    kv_heads: int
    """KV heads in a tile."""
    block_m: int
    """Rows of a tile: pairs of a query row and a query head."""
    block_n: int
    """Columns of a tile: pairs of a key and a KV head."""
    dot: tl.dtype
    """Dtype of the operands of ``tl.dot``."""


def choose_tiles(q_rows: int, group: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Sizes for requests of up to ``q_rows`` query rows with ``group`` query heads for each KV head.

    They follow only from constants: a request's bits must not depend on other requests, nor a graph on the batch it
    was captured with.
    """
    # Under the interpreter an operation costs the same whatever its size: few programs and large tiles. Outside the
    # emulation its dot would multiply the words of bfloat16 as integers; float32 holds the same products.
    together = kv_heads & -kv_heads if INTERPRETED else 1  # the largest power of two that divides them
    rows = _block(q_rows * group * together)
    if INTERPRETED:
        return Tiles(together, min(rows, 1024), 256, tl.float32)
    block_n = max(16, min(64, 16384 // (head_dim * dtype.itemsize)))  # K and V tiles of at most 16 KB each
    dot = getattr(tl, str(dtype).removeprefix("torch."))
    return Tiles(together, min(rows, 64, 8192 // head_dim), block_n, dot)


def _block(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())  # tensor cores multiply tiles of 16 rows and more


# Triton compiles a kernel for each value of a constant, and for integers that are 1 or multiples of 16. Not for those
# that differ from step to step or layer to layer and make nothing faster: 1,613 kernels of eager core are 1,074 so.
@triton.jit(
    do_not_specialize=["window", "spans", "table_row", "rank", "ranks", "interleave"],
    do_not_specialize_on_alignment=["kv_lens_ptr"],
)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_out_ptr, partial_ptr, lse_ptr,
    req_to_token_ptr, requests_ptr, kv_lens_ptr, cu_seqlens_q_ptr, positions_ptr, mask_ptr, spans_ptr, sinks_ptr,
    scale, v_scale, logit_cap, window, spans,
    q_row, q_head, q_dim, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row,
    rank, ranks, interleave,
    PAGE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, NODES: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    PART: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attention of one request and ``KV_HEADS`` KV heads: one tile of its rows, one split of its keys.

    A tile's rows are pairs (query row, query head) and its columns pairs (key, KV head), so that all query heads of a
    KV head share its keys. ``NODES`` is 0 for attention aligned to the end of the keys, which is ``CAUSAL`` or sees all
    keys, and with ``HAS_SPANS`` also sees those of the row's span: ``spans`` ranges of positions for each request, both
    ends included. Otherwise a request is a draft tree of ``NODES`` rows and ``mask`` [bs, NODES, NODES] says which node
    sees which. With ``SPLITS`` > 1 the result is partial, and ``merge_kernel`` finishes it. ``PAGE``: slots of a page,
    or 0 if the stride between slots is the same everywhere, so that pages do not matter. ``PART``: the keys before the
    step, the keys of the step, the keys of ``rank`` (``interleave`` keys in turn for each of ``ranks``), or all.
    """
    request, head_group = tl.program_id(0), tl.program_id(1)
    tile, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    q_start = tl.load(cu_seqlens_q_ptr + request).to(tl.int64)
    q_len = (tl.load(cu_seqlens_q_ptr + request + 1) - q_start).to(tl.int32)
    kv_len = tl.load(kv_lens_ptr + request)
    prefix = kv_len - q_len  # negative for a padded request; its first rows then see no key
    if tile * BLOCK_M >= q_len * (GROUP * KV_HEADS):
        return  # the grid is made for the longest request

    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = pair // (GROUP * KV_HEADS), head_group * (GROUP * KV_HEADS) + pair % (GROUP * KV_HEADS)
    live = row < q_len
    column = tl.arange(0, BLOCK_N)
    column_key, column_head = column // KV_HEADS, head_group * KV_HEADS + column % KV_HEADS
    dim = tl.arange(0, D)
    q_at = q_ptr + ((q_start + row) * q_row + head * q_head)[:, None] + (dim * q_dim)[None, :]
    q = tl.load(q_at, mask=live[:, None], other=0.0).to(DOT)
    if NODES > 0:  # a node's position is its depth in the tree, not its row
        position = tl.load(positions_ptr + q_start + row, mask=live, other=0).to(tl.int32)
    else:
        position = prefix + row

    # Split the keys that any row may see, by the request's own length only.
    KEYS: tl.constexpr = BLOCK_N // KV_HEADS
    first_key = tl.maximum(prefix - window, 0)
    last_key = kv_len
    if PART == "new":
        first_key = tl.maximum(first_key, prefix)
    if PART == "prefix":
        last_key = tl.maximum(prefix, 0)
    per_split = tl.cdiv(tl.maximum(last_key - first_key, 0), SPLITS * KEYS) * KEYS
    begin = first_key + split * per_split
    end = tl.minimum(begin + per_split, last_key)

    # Online softmax: running maximum, sum and weighted values. A maximum of -inf means "no key yet".
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, D], 0.0, tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - one is decided at compile time, the other on the device
        if split == 0:  # one split carries the sink: a key that has weight but no value
            m = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
            total = tl.full([BLOCK_M], 1.0, tl.float32)

    table = req_to_token_ptr + tl.load(requests_ptr + request) * table_row + column_key
    k_at = k_ptr + (column_head * k_head)[:, None] + dim[None, :]
    v_at = v_ptr + (column_head * v_head)[:, None] + dim[None, :]
    for start in range(begin, end, KEYS):
        key = start + column_key
        owned = key < end  # slots after the end may hold NaN of other requests, and 0 * NaN is NaN
        if PART == "rank":
            owned = owned & (key // interleave % ranks == rank)
        slot = tl.load(table + start, mask=owned, other=0).to(tl.int64)
        if PAGE > 0:
            k_slots = slot // PAGE * k_page + slot % PAGE * k_slot
            v_slots = slot // PAGE * v_page + slot % PAGE * v_slot
        else:
            k_slots, v_slots = slot * k_slot, slot * v_slot
        k = tl.load(k_at + k_slots[:, None], mask=owned[:, None], other=0.0).to(DOT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:  # cap * tanh(s / cap), written so that exp cannot overflow
            e = tl.exp(tl.abs(s) * (-2.0 / logit_cap))
            s = tl.where(s < 0, -logit_cap, logit_cap) * (1.0 - e) / (1.0 + e)

        if NODES > 0:
            node = key - prefix
            drafted = owned & (node >= 0)
            depth_at = positions_ptr + q_start + node
            key = tl.where(drafted, tl.load(depth_at, mask=drafted, other=0).to(tl.int32), key)
            mask_at = mask_ptr + ((request * NODES + row) * NODES)[:, None] + node[None, :]
            seen = tl.load(mask_at, mask=live[:, None] & drafted[None, :], other=1) != 0
        elif CAUSAL:
            seen = key[None, :] <= position[:, None]
            if HAS_SPANS:
                for span in range(spans):
                    first = tl.load(spans_ptr + (request * spans + span) * 2)
                    last = tl.load(spans_ptr + (request * spans + span) * 2 + 1)
                    inside = (first <= position) & (position <= last)
                    seen = seen | (inside[:, None] & ((first <= key) & (key <= last))[None, :])
        else:
            seen = owned[None, :]
        visible = seen & owned[None, :] & (key[None, :] >= (position - window)[:, None])
        if KV_HEADS > 1:
            visible = visible & ((head // GROUP)[:, None] == column_head[None, :])
        s = tl.where(visible, s, float("-inf"))

        new_m = tl.maximum(m, tl.max(s, 1))
        base = tl.where(new_m == float("-inf"), 0.0, new_m)  # never -inf - -inf
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(m - base)
        v = tl.load(v_at + v_slots[:, None], mask=owned[:, None], other=0.0).to(DOT)
        acc = acc * shrink[:, None] + tl.dot(p.to(DOT), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = new_m

    divisor = tl.where(total > 0, total, 1.0)  # a row without keys gets 0, not 0 / 0
    result = acc * (v_scale / divisor)[:, None]
    out_row = (q_start + row) * HEADS + head
    if SPLITS == 1:
        out_at = out_ptr + (out_row * D)[:, None] + dim[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=live[:, None])
        if HAS_LSE:
            tl.store(lse_out_ptr + out_row, m + tl.log(divisor), mask=live)
    else:  # an empty split writes too: the workspace holds whatever an earlier step left in it
        part = out_row * SPLITS + split
        tl.store(partial_ptr + (part * D)[:, None] + dim[None, :], result, mask=live[:, None])
        tl.store(lse_ptr + part, m + tl.log(divisor), mask=live)


@triton.jit
def merge_kernel(
    partial_ptr, lse_ptr, out_ptr, lse_out_ptr,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One row, ``BLOCK_H`` heads: the mean of the splits' results, weighted by their softmax sums."""
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    out_row = tl.program_id(0).to(tl.int64) * HEADS + head
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, D)
    part = (out_row * SPLITS)[:, None] + split[None, :]
    there = (head < HEADS)[:, None] & (split < SPLITS)[None, :]
    lse = tl.load(lse_ptr + part, mask=there, other=float("-inf"))
    m = tl.max(lse, 1)
    weight = tl.exp(lse - tl.where(m == float("-inf"), 0.0, m)[:, None])  # an empty split weighs nothing
    total = tl.sum(weight, 1)
    divisor = tl.where(total > 0, total, 1.0)
    weight = weight / divisor[:, None]
    values = tl.load(partial_ptr + (part * D)[:, :, None] + dim[None, None, :], mask=there[:, :, None], other=0.0)
    result = tl.sum(weight[:, :, None] * values, 1)
    out_at = out_ptr + (out_row * D)[:, None] + dim[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
    if HAS_LSE:
        tl.store(lse_out_ptr + out_row, m + tl.log(divisor), mask=head < HEADS)
