"""Bugs inside a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from plain_backends import declared

from attn_testkit.contract import KernelBackend
from attn_testkit_corpus.faults.catalogue import bug, helper

MODES = ("decode", "extend", "target-verify")


@triton.jit
def logits(q, k, key, kv_len, position, scale, cap, window, MASKS_TAIL: tl.constexpr):
    scores = tl.dot(q, tl.trans(k)) * scale
    if cap > 0:
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
    there, before = key[None, :] < kv_len, key[None, :] <= position[:, None]
    seen = before & there if MASKS_TAIL else before | (key[None, :] >= kv_len)
    if window >= 0:
        seen = seen & (key[None, :] >= position[:, None] - window)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def packed(
    Q, K, V, OUT, SINKS, TABLE, LENS, CU, q_row, q_head, o_row, o_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    table_row, scale, cap, window, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_SINK: tl.constexpr, SLOTS: tl.constexpr, MASKS_TAIL: tl.constexpr,
    STORES_EMPTY: tl.constexpr, TILES_OF_HEADS: tl.constexpr,
):  # fmt: skip
    request, block, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len, start = tl.load(LENS + request), tl.load(CU + request)
    count = tl.load(CU + request + 1) - start
    d = tl.arange(0, D)
    packed_row = block * ROWS + tl.arange(0, ROWS)
    token, head = packed_row // G, kv_head * G + packed_row % G
    if TILES_OF_HEADS > 0:
        token, head = block + tl.arange(0, ROWS) * 0, kv_head * ROWS + tl.arange(0, ROWS)
        kv_head = kv_head // TILES_OF_HEADS
    live = (token < count) & (head < HEADS)
    row = (start + token).to(tl.int64)[:, None]
    o_at = OUT + row * o_row + head[:, None] * o_head + d
    if STORES_EMPTY & (kv_len == 0) & (block == 0):
        tl.store(o_at, tl.zeros([ROWS, D], OUT.dtype.element_ty))
    if block * ROWS < count * G:
        q = tl.load(Q + row * q_row + head[:, None] * q_head + d, mask=live[:, None], other=0.0)
        position = kv_len - count + token
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        if HAS_SINK:
            top = tl.load(SINKS + head, mask=live, other=-1e30)
            total = tl.full([ROWS], 1.0, tl.float32)
        low = 0
        if window >= 0:
            low = tl.maximum(kv_len - count + tl.min(token, 0) - window, 0) // KEYS * KEYS
        for first in range(low, kv_len, KEYS):
            key = first + tl.arange(0, KEYS)
            there = key < kv_len
            page = tl.load(TABLE + request * table_row + key // PAGE, mask=there, other=0).to(tl.int64)[:, None]
            slot = (key % SLOTS)[:, None]
            k = tl.load(K + page * k_page + slot * k_slot + kv_head * k_head + d, mask=there[:, None], other=0.0)
            v = tl.load(V + page * v_page + slot * v_slot + kv_head * v_head + d, mask=there[:, None], other=0.0)
            scores = logits(q, k.to(q.dtype), key, kv_len, position, scale, cap, window, MASKS_TAIL)
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp(scores - new_top[:, None])
            faded = tl.exp(top - new_top)
            total = total * faded + tl.sum(p, 1)
            acc = acc * faded[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype))
            top = new_top
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(o_at, out.to(OUT.dtype.element_ty), mask=live[:, None])


class Packed(KernelBackend):
    capabilities = declared(
        *MODES,
        heads={"families": {"gqa", "mha"}, "gqa_ratios": {1, 2, 4, 6, 20}, "head_dims": {64, 128}},
        precision={"dtypes": {"bf16", "fp16"}},
        kv_pool={"page_sizes": {16, 32}, "kv_layouts": {"nhd", "hnd", "kv-in-block"}},
        bounds={"max_extend_tokens": 256, "max_context_len": 1200},
        windows=MODES,
        options={"logit_cap": True, "sinks": True},
        server={"padded_requests": {"rows", "nothing"}},
    )

    def get_cuda_graph_seq_len_fill_value(self):
        return 0

    def arguments(self, layer):
        """In place of the right ones."""
        return {}

    def grid(self, plan):
        layer = plan.layer
        return len(plan.kv_lens), -(-plan.max_q_len * layer.q_per_kv // 16), layer.tp_k_head_num

    def run(self, q, kv, plan):
        layer, table, (k, v) = plan.layer, plan.page_table, kv
        out = torch.empty(len(q), layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype, device=q.device)
        sinks = plan.kv_lens if layer.sinks is None else layer.sinks
        right = {"ROWS": 16, "SLOTS": plan.page_size, "MASKS_TAIL": True, "STORES_EMPTY": False, "TILES_OF_HEADS": 0}
        packed[self.grid(plan)](
            q, k, v, out, sinks, table, plan.kv_lens, plan.cu_seqlens_q, *q.stride()[:2], *out.stride()[:2],
            *k.stride()[:3], *v.stride()[:3], table.stride(0), layer.scaling, layer.logit_cap,
            layer.sliding_window_size, G=layer.q_per_kv, D=layer.head_dim, PAGE=plan.page_size,
            HEADS=layer.tp_q_head_num, KEYS=32, HAS_SINK=layer.sinks is not None, **right | self.arguments(layer),
        )  # fmt: skip
        return out


@bug(5, "vllm #57614", "decode-mha2-d64-bf16-p32-k600.70.12-contiguous-shifted-w46-sink-b4nan", execution="graph")
class SixteenSlotPages(Packed):
    """Pages of 32 slots are read as if they had 16."""

    def arguments(self, layer):
        return {"SLOTS": 16}


@bug(
    5, "flashinfer #5090", "target-verify-gqa2x2-d128-fp16-p16-k0.1.16-chain7-reversed-negative-w0-cap1.5-sink-b6stale"
)
class UnmaskedTail(Packed):
    """Keys behind a request's last one are zeros, and are not masked: each has a weight of exp(0)."""

    def arguments(self, layer):
        return {"MASKS_TAIL": False}


@bug(
    5,
    "flash-attention #1155",
    "decode-gqa2x2-d64-fp16-p16-k7x2-contiguous-shifted-w0-cap1.5-sink-b3stale",
    "completes",
    execution="graph",
)
class ZeroLenStore(Packed):
    """Without keys a whole tile of rows is stored."""

    def arguments(self, layer):
        return {"STORES_EMPTY": True}


@bug(5, "FreeToken #177", "decode-gqa24x2-d64-bf16-p16-k70.33.1-shuffled-gauss-w40-cap1.5-sink-b3prod")
class HeadTilesCross(Packed):
    """Groups of more than 16 heads are cut into tiles of 16, and a tile may reach into the next KV head's group."""

    capabilities = Packed.capabilities.with_changes(heads={"gqa_ratios": {2, 8, 20, 24}})

    @helper
    def tiles(self, layer):
        return -(-layer.q_per_kv // 16) if layer.q_per_kv > 16 else 0

    def arguments(self, layer):
        return {"TILES_OF_HEADS": self.tiles(layer)}

    def grid(self, plan):
        tiles = self.tiles(plan.layer)
        requests, blocks, heads = super().grid(plan)
        return (requests, plan.max_q_len, heads * tiles) if tiles else (requests, blocks, heads)


@bug(
    5,
    "pytorch #151359",
    "target-verify-gqa6x2-d128-fp16-p32-k0.1.32-chain4-shared-gauss-cap1.5-sink-b4nan",
    "completes",
)
class PowerOfTwoGroups(Packed):
    """A tile has as many rows as a group has heads, which has to be a power of two."""

    def arguments(self, layer):
        return {"ROWS": layer.q_per_kv}

    def grid(self, plan):
        return len(plan.kv_lens), plan.max_q_len, plan.layer.tp_k_head_num
