"""Index overflow, and launches that are too large."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_launchers import Known, wide, windowed
from parents_sparse import PAGE_BYTES
from parents_split_kv import OfTwoModes
from parents_varlen import Varlen
from plain_backends import FP8, Tiled, declared, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.indexer import IndexerParent

_BITS_31 = 1 << 31


@bug(
    1,
    "sglang #20389",
    "extend-gqa2x2-d64-bf16-p16-"
    "k106.107.108.109.110.111.112.113.114.115.116.117.118.119.120.121.122.123.124.125.126.127.128.1.2.3.4.5.6.7.8.9.10.11.12.13.14.15.16.17.18.19.20.21.22.23-n2a2x46-shuffled-gauss-b48prod",
)
class RowOffsetOverflows(Tiled):
    """Row times stride overflows. 32 bits there, 16 bits here, as such a batch is too large for a test."""

    def query(self, q, plan):
        offset = torch.arange(len(q), device=q.device) * q.stride(0) % 65536
        return q[offset // max(q.stride(0), 1)]


@bug(3, "ATOM #702", "decode-mha2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "reads-own-kv")
class PageIdCutOff(Tiled):
    """Decode with pages of 16 cuts page ids to 16 bits there, 6 here: high pages are read as low ones."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"page_sizes": {1, 16, 64}, "kv_dtypes": FP8})

    def slots(self, plan):
        if plan.max_q_len > 1 or plan.page_size != 16:
            return super().slots(plan)
        offset = torch.arange(16, device=plan.page_table.device)
        return ((plan.page_table.long() % 64)[:, :, None] * 16 + offset).flatten(1)


@bug(3, "aiter #2517", "extend-mha2-d64-bf16-p1-k254.510.1022-n4a4x2.3-shuffled-plus_minus_one-b3prod")
class ZerosBeyondTheDescriptor(Tiled):
    """A buffer descriptor overflows for a large pool with pages of 1: prefill reads zeros from slot 512 on."""

    capabilities = wide_capabilities("decode", "extend")

    def keys(self, kv, slots, plan):
        right = super().keys(kv, slots, plan)
        if plan.max_q_len == 1 or plan.page_size > 1 or self.context.kv_pool.num_slots <= 1024:
            return right
        return tuple(side.masked_fill((slots >= 512)[:, :, None, None], 0.0) for side in right)


@bug(
    3,
    "xformers #719",
    "decode-gqa2x2-d64-bf16-p16-k33000-shuffled-one_hot-layers1from0-b1prod",
    of_a_tier="decode-gqa2x2-d64-bf16-p1-k66000-shuffled-one_hot-b1prod",
)
class Int16Positions(Tiled):
    """A key's position has 16 bits: from 32768 on it is negative, and not seen."""

    capabilities = declared("decode", "extend")

    def visible(self, index, rows):
        return super().visible(index, rows) & ((index + 32768) % 65536 - 32768 >= 0)


@bug(
    4,
    "tokenspeed #522",
    "decode-gqa2x2-d128-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool",
    "reads-own-kv",
)
class NarrowOffset(Known):
    """Page * page stride overflows; scaled to 256 pages."""

    capabilities = wide("decode", kv_pool={"page_sizes": {16}})

    def slots(self, plan):
        offset = torch.arange(plan.page_size, device=plan.page_table.device)
        return (plan.page_table.long()[:, :, None] % 256 * plan.page_size + offset).flatten(1)


@bug(
    4,
    "tpu-inference #2755",
    "decode-gqa2x2-d64-bf16-p16-k32769-shuffled-one_hot-w11same-layers1from0-b1prod",
    of_a_tier="decode-gqa2x2-d64-bf16-p1-k66000.32769-contiguous-one_hot-w11-b2prod",
)
class Int16WindowPositions(Known):
    """Positions in int16, in layers with a window."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        w = rows.layer.sliding_window_size
        if w < 0:
            return super().visible(index, rows)
        q, k = rows.position.to(torch.int16)[:, None], index.to(torch.int16)[None]
        return (q >= k) & ((q - w).to(torch.int16) <= k) & (index < rows.kv_lens[:, None])


@bug(
    5,
    "aiter #3062",
    "extend-gqa2x2-d64-bf16-p16-k9.37.1-n2a2x3-shuffled-gauss-layers1from0-b4prod-bigpool",
    "reads-own-kv",
)
class BlockId16(Tiled):
    """Page ids are cut to 16 bits."""

    capabilities = declared("decode", "extend")

    def slots(self, plan):
        offset = torch.arange(plan.page_size, device=plan.page_table.device)
        return ((plan.page_table.long() & 0xFFFF)[:, :, None] * plan.page_size + offset).flatten(1)


@bug(
    6,
    "onnxruntime #21687",
    "decode-gqa7x18-d64-bf16-p1-k1x174.3x174.9x173-shuffled-gauss-layers1from0-b521prod",
    "output-written",
)
class RowsOver65535(Varlen):
    """A launch has 65,535 groups at most, rows times heads: those behind are not computed."""

    capabilities = replace(Varlen.capabilities, eager={"decode"}, graph=())

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        t, h, _ = out.shape
        group = torch.arange(t * h, device=out.device).view(t, h)
        return torch.where((group < 65535)[..., None], out, torch.empty_like(out))


@bug(
    7,
    "aiter #4427",
    "extend-mqa4-d128-bf16-p16-k9.37.1-n2a2x3-shuffled-gauss-kvfp8e4m3-layers1from0-b4prod-bigpool",
    "reads-own-kv",
)
class BlockStrideInt32(OfTwoModes):
    """The kernel for FP8 multiplies page and stride in 32 bits; what wraps is taken for page 0."""

    def table(self, plan):
        pages = self.context.group_of(plan.layer).kv_pool.get_kv_pages(plan.layer.layer_id)[0]
        table = plan.page_table.long()
        return table.masked_fill(table * pages.stride(0) >= _BITS_31, 0) if pages.dtype.itemsize == 1 else table


@bug(
    14,
    "sglang #34725",
    "decode-mqa4-d128-bf16-p16-k25.69.1-shuffled-gauss-sel16-idx4-layers1from0-b4prod-bigpool",
    "selects-best",
)
class PageOffsetsOf32Bits(IndexerParent):
    """The byte at which a page of index keys begins is computed in 32 bits."""

    def gathered(self, slots, layer_id):
        page = slots // 64
        offset = page.to(torch.int32) * torch.tensor(PAGE_BYTES, dtype=torch.int32)
        wrapped = offset.long().div(PAGE_BYTES, rounding_mode="floor").clamp(min=0)
        return super().gathered(wrapped * 64 + slots % 64, layer_id)


@bug(
    15,
    "vllm-xpu-kernels #459",
    "decode-gqa2x2-d64-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool",
    "reads-own-kv",
)
class SurfaceOf24Bits(Tiled):
    """Rows of K and V wrap around at 2^24."""

    capabilities = wide("decode", "extend")

    def keys(self, kv, slots, plan):
        return super().keys(kv, slots % (1 << 24), plan)
