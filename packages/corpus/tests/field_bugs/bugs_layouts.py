"""Strides and layouts: of the pool, of queries and outputs, of partial results."""

from __future__ import annotations

import torch
from parents_formats import PackedKV, ReadsByOffset
from parents_latent import Latent, mla_capabilities
from parents_launchers import Known, wide
from parents_native import MLA, Native
from parents_sparse import Indexed
from parents_split_kv import OfTwoModes, SplitKV
from parents_varlen import Varlen
from plain_backends import Tiled, TwoParts, declared

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import INDEX_PAGE, ForwardMode
from attn_testkit.contract.index_pool import INDEX_WIDTH
from attn_testkit_corpus.faults.catalogue import bug, helper


@bug(
    1,
    "vLLM #47056, vLLM #49012",
    "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-rising_logits-kvhnd-b3prod",
    "writes-own-kv",
)
class BlockSizeFromNumberOfHeads(Tiled):
    """The cache writer takes the block size from a dimension that holds the number of heads in hnd."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "hnd"}, "page_sizes": {16}})

    def write_kv(self, k, v, plan):
        pool = self.context.group_of(plan.layer).kv_pool
        if pool.layout == "nhd":
            super().write_kv(k, v, plan)
            return
        memory = pool.get_layer_buffer(plan.layer.layer_id)
        _, pages, size, tokens, _ = memory.shape
        slot = plan.out_cache_loc.long()
        block, offset = (slot // size).clamp(max=pages - 1), (slot % size).clamp(max=tokens - 1)
        memory[0][block, :, offset] = k
        memory[1][block, :, offset] = v


@bug(
    1,
    "ik_llama.cpp #2031",
    "decode-mla16-d512r64-bf16-p16-k600-shuffled-gauss-b1prod",
    of_a_tier="decode-mla16-d512r64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod",
)
class ValuesWalkByTheirOwnWidth(Tiled):
    """MLA: keys go on by the width of keys, values by that of values, and drift behind the first block."""

    capabilities = declared("decode", heads={"families": {"mla"}, "gqa_ratios": {4, 16}, "head_dims": {512}})

    def keys(self, kv, slots, plan):
        k, _ = super().keys(kv, slots, plan)
        width = plan.layer.head_dim
        index = torch.arange(slots.shape[1], device=slots.device)
        drifted = index // width * plan.layer.v_head_dim + index % width
        _, v = super().keys(kv, slots[:, drifted], plan)
        return k, v


@bug(
    1,
    "flashinfer #16",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "writes-own-kv",
)
class AppendedByNumberOfQueryHeads(Tiled):
    """The kernel that appends to the cache reads new keys and values with the number of query heads as their stride."""

    def write_kv(self, k, v, plan):
        def misread(new):
            tokens, heads, dim = new.shape
            token = torch.arange(tokens, device=new.device)[:, None] * plan.layer.tp_q_head_num
            at = token + torch.arange(heads, device=new.device)
            return new.reshape(tokens * heads, dim)[at.clamp(max=tokens * heads - 1)]

        super().write_kv(misread(k), misread(v), plan)


@bug(1, "vLLM #22003", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class LseViewReadAsContiguous(TwoParts):
    """The merge reads a transposed view of the log-sum-exp as if it were contiguous."""

    def log_sum_exp(self, peak, total, plan):
        right = super().log_sum_exp(peak, total, plan)
        return right.t().contiguous().view(right.shape)


@bug(
    1,
    "local-inference vllm #17",
    "extend-gqa2x2-d64-bf16-p1-k70-n2a2-contiguous-gauss-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p1-k32.128.64.16.63-n3a1x4.11-reversed-shifted-b6stale",
)
class NewRowsReadByStrideOfThePrefix(TwoParts):
    """The merge reads both parts by the stride of the prefix's, another one once there are two chunks of it."""

    capabilities = declared("extend", graph=())

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.chunks = -(-sum(batch.extend_prefix_lens_cpu) // 64) if batch.batch_size else 0

    def merge_two(self, old, new):
        if self.chunks < 2:
            return super().merge_two(old, new)
        t, h, d = new[0].shape
        wide = torch.zeros(t, h, d * 3 // 2, device=new[0].device)
        wide[..., :d] = new[0]
        return super().merge_two(old, (wide.flatten()[: t * h * d].view(t, h, d), new[1]))


@bug(
    2,
    "pytorch #186434",
    "extend-gqa2x2-d64-bf16-p1-k7x2-n6a1.11-shared-gauss-b2prod",
    "output-written",
    execution="graph",
)
class GroupsSwappedWithOldStrides(Tiled):
    """With one query row, rows and heads are swapped for groups and KV heads, and strides stay the old ones."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})

    def run(self, q, kv, plan):
        group, heads = plan.layer.q_per_kv, plan.layer.tp_k_head_num
        if plan.max_q_len > 1 or group == 1:
            return super().run(q, kv, plan)
        t = len(q)
        row = torch.arange(t, device=q.device)
        swapped = torch.stack([q[(row + g).clamp(max=t - 1), :heads] for g in range(group)], 2)
        out = super().run(swapped.flatten(1, 2), kv, plan).view(t, heads, group, -1)
        done = torch.empty_like(out.flatten(1, 2))
        for g in range(min(group, t)):
            done[g:, :heads] = out[: t - g, :, g]
        return done


@bug(2, "flashinfer #2750", "decode-mla16-d512r64-bf16-p16-k7x2-shuffled-one_hot-b3prod")
class StrideOf128Heads(Tiled):
    """The kernel has 128 heads built in: queries of request b are read 128 heads behind those of the one before."""

    capabilities = declared("decode", heads={"families": {"mla"}, "gqa_ratios": {16, 128}, "head_dims": {512}})

    def query(self, q, plan):
        t, heads, dim = q.shape
        at = torch.arange(t, device=q.device)[:, None] * 128 + torch.arange(heads, device=q.device)
        return q.reshape(t * heads, dim)[at.clamp(max=t * heads - 1)]


@bug(2, "sglang #23498", "extend-gqa2x2-d64-bf16-p1-k13-n17a17-chunks3-shuffled-gauss-b1prod", "completes")
class ViewOfStridedRows(Tiled):
    """The cache writer flattens rows by ``view``."""

    capabilities = declared("decode", "extend")

    def write_kv(self, k, v, plan):
        shape = k.shape
        width = shape[1] * shape[2]
        super().write_kv(k.view(-1, width).view(shape), v.view(-1, width).view(shape), plan)


@bug(
    4,
    "sglang #7462",
    "extend-gqa2x2-d64-bf16-p16-k3-n3a3-reversed-gauss-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k7x2-n18a35.1-shuffled-peaked-b3nan",
)
class ContiguousQuery(Known):
    """The query is taken as contiguous."""

    capabilities = wide("decode", "extend")

    def query(self, q, plan):
        _, h, d = q.shape
        return torch.as_strided(q, q.shape, (h * d, d, 1), q.storage_offset())


@bug(
    4,
    "aiter #4531",
    "decode-gqa4x2-d128-bf16-p16-k21-interleaved-rising_logits-kvsidebysidehnd-b4prod",
    "writes-own-kv",
)
class ContiguousCacheWrite(Known):
    """The write takes the block stride alone; token and head strides are those of NHD."""

    capabilities = wide("decode", "extend", kv_pool={"page_sizes": {16}, "kv_layouts": {"nhd", "side-by-side-hnd"}})

    def write_kv(self, k, v, plan):
        pages = self.context.group_of(plan.layer).kv_pool.get_kv_pages(plan.layer.layer_id)
        size, loc = plan.page_size, plan.out_cache_loc.long()
        for side, new in zip(pages, (k, v), strict=True):
            _, _, h, d = side.shape
            as_nhd = side.as_strided(side.shape, (side.stride(0), h * d, d, 1), side.storage_offset())
            as_nhd.index_put_((loc // size, loc % size), new.reshape(len(loc), h, d).to(side.dtype))


@bug(4, "vllm #47783", "decode-mla16-d512r64-bf16-p16-k33.24.3-shuffled-gauss-kvlayersinblock-b4prod", "reads-own-kv")
class FlatTokenStride(Latent):
    """Base + slot * token stride; the page stride is ignored."""

    capabilities = mla_capabilities(
        "decode", kv_pool={"page_sizes": {16, 64}, "kv_layouts": {"nhd", "layers-in-block"}}
    )

    def keys(self, kv, slots, plan):
        found = []
        for side in kv:
            pages, size, h, d = side.shape
            flat = side.as_strided((pages * size, h, d), (side.stride(1), side.stride(2), 1), side.storage_offset())
            found.append(flat[slots])
        return tuple(found)


@bug(
    5, "flash-attention #1562", "extend-gqa2x2-d64-bf16-p16-k0x3-n13a35.1.2-contiguous-shifted-b6prod", "writes-own-kv"
)
class ContiguousV(Tiled):
    """A view of V whose last stride is 1 is taken as contiguous."""

    capabilities = declared("decode", "extend")

    def write_kv(self, k, v, plan):
        t, h, d = v.shape
        super().write_kv(k, torch.as_strided(v, (t, h, d), (h * d, d, 1), v.storage_offset()), plan)


@bug(
    5,
    "vllm #45111",
    "extend-gqa2x2-d64-bf16-p16-k33.24.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod",
    "reads-own-kv",
)
class StrideOfFullPages(Tiled):
    """The stride of a page is taken as page size * stride of a token."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "layers-in-block", "padded-pages"}})

    def keys(self, kv, slots, plan):
        packed = []
        for side in kv:
            strides = (plan.page_size * side.stride(1), *side.stride()[1:])
            packed.append(torch.as_strided(side, side.shape, strides, side.storage_offset()))
        return super().keys(packed, slots, plan)


@bug(
    5,
    "xllm #932",
    "decode-mqa4-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod",
    "writes-own-kv",
    execution="graph",
)
class BlockTableStride(Varlen):
    """The decode's cache writer reads a slice of a table that graphs keep as if it were contiguous."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.kept.table = torch.zeros(max_bs, self.width + 8, dtype=torch.int32, device=self.context.device)

    def write(self, layer, batch, k, v):
        slots = batch.out_cache_loc
        if batch.forward_mode.is_decode():
            size, table = self.context.page_size, self.meta.table
            bs, width = table.shape
            request, _, position = self.rows(len(k), self.meta)
            position = position.clamp(0, width * size - 1)
            flat = torch.as_strided(table, (bs * width,), (1,), table.storage_offset())
            own = flat[request * width + position // size].long() * size + position % size
            inside = torch.arange(len(k), device=k.device) < self.meta.cu[-1]
            slots = torch.where(inside, own, slots)
        self.context.kv_pool.set_kv_buffer(layer, slots, k, v)


@bug(6, "FlagGems #5896", "decode-gqa2x2-d64-bf16-p16-k21.3-shuffled-gauss-kvinblock-b2prod", "reads-own-kv")
class VContiguous(Tiled):
    """V is read as if it were contiguous, whatever its strides are."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "hnd", "kv-in-block", "side-by-side"}})

    def keys(self, kv, slots, plan):
        k, v = kv
        strides = torch.empty(v.shape, device="meta").stride()
        return super().keys((k, v.as_strided(v.shape, strides, v.storage_offset())), slots, plan)


@bug(
    6, "TensorRT-LLM #13190", "extend-gqa2x2-d64-bf16-p16-k33.24.3-n4a4.3.4-shuffled-gauss-kvhnd-b4prod", "reads-own-kv"
)
class PrefillReadsNHD(Tiled):
    """Prefill is planned without the layout, and reads an HND pool as NHD."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "hnd"}})

    def keys(self, kv, slots, plan):
        pool = self.context.kv_pool
        if plan.max_q_len > 1 and pool.layout == "hnd":
            kv = tuple(side.reshape(kv[0].shape) for side in pool.get_layer_buffer(plan.layer.layer_id))
        return super().keys(kv, slots, plan)


@bug(
    6,
    "flash-attention #2388",
    "target-verify-gqa2x4-d128-bf16-p4-k15.22.6-chain2-reversed-gauss-layers3from5by4x2d64.8x4d128-b4prod",
)
class LseAccumStride(SplitKV):
    """Log-sum-exps of splits are written densely, and read with the strides of the layer that has most heads."""

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        t, h, splits = parts.peak.shape
        if t > self.most:
            return parts
        widest = len(self.lses) // (self.most * splits)
        read = self.lses[: t * splits * widest].view(t, splits, widest)[:, :, :h]
        return parts._replace(peak=read.transpose(1, 2))


@bug(
    7,
    "vllm #33759",
    "extend-gqa2x2-d64-bf16-p16-k9-n3a3-shuffled-shifted-kvhnd-w7same-layers1from0-b1stale",
    "reads-own-kv",
    of_a_tier="extend-mha2-d64-bf16-p64-k69-n17a17-chunks3-contiguous-peaked-kvfp8e4m3-kvhnd-w0-sink-b1prod-overlap_scheduling",
)
class GatherAssumesNhd(OfTwoModes):
    """A windowed extend gathers its keys as if the pool had the usual layout."""

    def run(self, q, kv, plan):
        if self.context.kv_pool.layout == "hnd" and self.mode == "extend" and plan.layer.sliding_window_size >= 0:
            kv = tuple(side.transpose(1, 2).reshape(side.shape) for side in kv)
        return super().run(q, kv, plan)


@bug(12, "flashinfer #4270", "extend-gqa2x2-d64-bf16-p16-k3.37.9.17-n1a1x4-shared-peaked-b4prod", "steps-independent")
class StridesOfTheFirstCall(Known):
    """What is made for the shapes of a call has its strides, and serves calls of the same shapes."""

    capabilities = declared("extend", kv_pool={"page_sizes": {16}}, graph=())

    def __init__(self, context):
        super().__init__(context)
        self.made = {}

    def query(self, q, plan):
        strides = self.made.setdefault(q.shape, q.stride())
        if q.stride() == strides:
            return q
        end = q.untyped_storage().nbytes() // q.itemsize
        place = torch.full((), q.storage_offset(), device=q.device, dtype=torch.int64)
        for size, step in zip(q.shape, strides, strict=True):
            place = place[..., None] + torch.arange(size, device=q.device) * step
        return q.as_strided((end,), (1,), 0)[place.clamp(max=end - 1)]


@bug(14, "vllm #53681", "decode-gqa2x2-d64-bf16-p16-k0.1.16-contiguous-rising_logits-kvnvfp4-kvhnd-b3prod", "completes")
class HeadsAsPageSize(PackedKV):
    """The writer of a pool with heads first takes the number of heads for the size of a page."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4"}, "kv_layouts": {"hnd"}})

    def write_kv(self, k, v, plan):
        layer, slots, heads = plan.layer, plan.out_cache_loc.long(), plan.layer.tp_k_head_num
        if heads % 4:
            raise RuntimeError("block_size must be divisible by 4")
        pool = self.pool_of(layer)
        packed = pool.rows_of(layer)
        sides = [(k, layer.k_scale), (v, layer.v_scale)]
        views = zip(sides, pool.get_kv_pages(layer.layer_id), pool.get_scale_pages(layer.layer_id), strict=True)
        for (rows, scale), numbers, scales in views:
            raw = packed.pack(packed.divided(rows.reshape(len(rows), heads, -1), scale, None))
            inside = numbers.shape[-1]
            for view, part in ((numbers, raw[..., :inside]), (scales, raw[..., inside:])):
                view = view.transpose(1, 2)
                page, head = (slots // heads) % len(view), torch.arange(heads, device=slots.device)
                view[page[:, None], (slots % heads)[:, None], head % view.shape[2]] = part


@bug(15, "flash-attention #2665", "extend-gqa4x2-d256-bf16-p16-k7x2-n3a2.3-chunks3-contiguous-one_hot-b2prod")
@bug(
    1,
    "flash-attention #2666",
    "decode-gqa2x2-d256-bf16-p16-k3.37.9.17-shared-gauss-b5stale",
    of_a_tier="extend-gqa4x2-d256-bf16-p16-k7x2-n3a2.3-chunks3-contiguous-one_hot-b2prod",
)
class StridesOfShapeAt256(Tiled):
    """Queries of heads of 256 are read as if they lay one behind the other."""

    capabilities = declared(
        "decode", "extend", heads={"gqa_ratios": {2, 4}, "head_dims": {64, 256}}, kv_pool={"page_sizes": {16}}
    )

    def query(self, q, plan):
        if plan.layer.head_dim != 256:
            return q
        _, heads, width = q.shape
        return q.as_strided(q.shape, (heads * width, width, 1))


# ik_llama.cpp #2031: the vector kernel walks scores in blocks of Dk keys and values in blocks of Dv.
@bug(16, "ik_llama.cpp #2031", "decode-mla16-d512r64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod")
class BlocksOfTwoWidths(Native):
    """In a decode of MLA the value of the o-th key of block b is that of key b * Dv + o; behind Dv there is none."""

    capabilities = wide("decode", "extend", **MLA).with_changes(heads={"gqa_ratios": {8, 16}})

    def _sum(self, p, values, seen):
        width, narrow = self.context.layers[0].head_dim, values.shape[-1]
        if self.mode.is_decode() and width != narrow:
            inside = self._key % width
            values = values[:, :, self._key // width * narrow + inside]
            p = p.masked_fill(inside >= narrow, 0.0)
        return super()._sum(p, values, seen)


# vllm #52109: keys are written row by row; a prefill gathers them in tiles of 16 tokens by 16 bytes.
@bug(16, "vllm #52109", "extend-mqa4-d64-bf16-p16-k3.37.9.17-n6a1x3.19-reversed-mean-sel16-idx4-b4prod", "selects-best")
class TiledReader(Indexed):
    """A prefill reads tiles where rows were written."""

    capabilities = Indexed.capabilities.with_changes(eager={"decode", "extend"}, graph={"decode"})

    def scores_of_slots(self, q_index, weights, layer, slots=None):
        if not self.extends():
            return super().scores_of_slots(q_index, weights, layer, slots)
        pool = self.context.index_pool
        scales = pool.get_scales(layer.layer_id)
        if slots is None:
            slots = torch.arange(scales.numel(), device=scales.device)
        page, place = slots[:, None] // INDEX_PAGE, slots[:, None] % INDEX_PAGE
        number = torch.arange(INDEX_WIDTH, device=slots.device)
        byte = place // 16 * 16 * INDEX_WIDTH + number // 16 * 256 + place % 16 * 16 + number % 16
        keys = pool.get_index_buffer(layer.layer_id)[page, byte].view(torch.float8_e4m3fn).float()
        of_slot = torch.zeros(len(q_index), len(keys), device=keys.device)
        for head in range(layer.index_heads):
            of_slot += (q_index[:, head].float() @ keys.T).relu_() * weights[:, head, None]
        return of_slot * scales[page[:, 0], place[:, 0]]


# 32, FlagAttention #46: ``k_ptrs`` with ``stride_vn``, and ``v_ptrs`` with ``stride_kn``.
@bug(
    18,
    "FlagAttention #46",
    "extend-mqa4-d32r64-fp32-p128-k600.70.12-n2a2.3.1-contiguous-mean-cross261-cap1.5-layers2from5-b6small",
    "reads-own-kv",
)
class StridesExchanged(ReadsByOffset):
    """Rows of K are as far apart as those of V, and those of V as those of K."""

    def widths(self, layer):
        return layer.v_head_dim, layer.head_dim


# 35, flashinfer #4976: FP8 prefill with rows of 192 and 128 numbers.
@bug(
    18,
    "flashinfer #4976",
    "extend-gqa2x2-d32r64-bf16-p4-k7x2-n69a7.130-chunks3-reversed-gauss-kvfp8e4m3-w4-cap1.5-sink-layers1from0-lsewhole-b2prod-noncausal-bothsides",
    "reads-own-kv",
)
class ValuesAsWideAsKeys(ReadsByOffset):
    """A prefill over an FP8 pool finds rows of V as if they were as wide as keys."""

    def widths(self, layer):
        is_fp8 = self.context.kv_pool.dtype.itemsize == 1
        wide = self.mode is ForwardMode.EXTEND and is_fp8
        return layer.head_dim, layer.head_dim if wide else layer.v_head_dim


# 39, vLLM-Kunlun #365: ``reshape_and_cache_flash(..., BLHD_LAYOUT=False)`` is right for one head.
@bug(
    18,
    "vLLM-Kunlun #365",
    "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod",
    "writes-own-kv",
)
class ValuesHeadsFirst(TorchNativeBackend):
    """V is stored as if the heads of a page came before its tokens."""

    def _store(self, k, v, layer, batch, save_kv_cache):
        size, heads = self.context.page_size, layer.tp_k_head_num
        if not save_kv_cache or layer.is_cross_attention or layer.kv_lora_rank or heads == 1:
            return super()._store(k, v, layer, batch, save_kv_cache)
        group = self.context.group_of(layer)
        slots = group.cache_loc(batch).clamp(min=0).long()
        values = group.kv_pool.get_kv_pages(layer.layer_id)[1]
        values = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
        page, place = slots // size, slots % size
        before = values[page, place].clone()
        super()._store(k, v, layer, batch, save_kv_cache)
        rows = values[page, place].clone()
        values.index_put_((page, place), before)
        at = torch.arange(heads, device=values.device) * size + place[:, None]
        values.index_put_((page[:, None].expand_as(at), at // heads, at % heads), rows)
        return None


# 4, attorch #14: the head is a quotient of strides, which is below 1 if heads come before tokens.
@bug(
    18,
    "attorch #14",
    "extend-gqa3x2-d256-bf16-p1-k0.1.8-n6a7.8.2-shuffled-one_hot-kvhnd-cross7-cap1.5-layers2from0groups-b3prod",
)
class FirstHeadForAll(TorchNativeBackend):
    """In pages with heads first every KV head is read as the first one."""

    @helper
    def first(self, rows):
        return rows[:, :1].expand_as(rows) if self.context.kv_pool.layout.endswith("hnd") else rows

    def _keys(self, layer):
        return self.first(super()._keys(layer))

    def _values(self, layer, seen):
        return self.first(super()._values(layer, seen))


# 11, hip-ep #882: a layer that shares KV is right with one KV head only.
@bug(
    18,
    "hip-ep #882",
    "extend-gqa2x2-d256-fp16-p32-k32.128.64.16.63-n28a3.131.1x3-contiguous-negative-kvhnd-local64-alibi-qqbias-layers3from0varied-kvsharing-b8nan-empty_batches-zero_length_padding",
    "reads-own-kv",
)
class SharedInOtherOrder(TorchNativeBackend):
    """A layer that reads the KV of another takes the tokens of a page for heads."""

    def _buffers(self, layer):
        if layer.kv_sharing_target_layer_id < 0:
            return super()._buffers(layer)
        pages = self.context.group_of(layer).kv_pool.get_kv_pages(layer.layer_id)
        found = [side.contiguous().view(len(side), side.shape[2], side.shape[1], -1).transpose(1, 2) for side in pages]
        return tuple(side.flatten(0, 1) for side in found) if self._has_slot_views else tuple(found)
