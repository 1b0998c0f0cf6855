"""Where something is read or written: pages, slots, heads, rows, strides, and which kernel has which head dim."""

from __future__ import annotations

from dataclasses import replace

import torch
from plain_backends import Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug

EXTEND = "extend-gqa2x2-d64-bf16-p16-k7x2-n9a16.1-reversed-gauss-b2prod"
EXTEND_GQA4 = "extend-gqa4x2-d64-bf16-p16-k7x2-n9a16.1-reversed-gauss-b2prod"
VERIFY = "target-verify-gqa2x2-d64-bf16-p1-k0.1.8-chain7-contiguous-mean-b3prod"


@bug("vLLM #34570", "decode-gqa2x2-d32-bf16-p1-k7x2-reversed-negative-b2prod", "output-written")
class NoLoopForSmallHeads(Tiled):
    """The loop over values runs head_dim / 16 / 4 times: for head dim 32 not at all."""

    capabilities = declared("decode", "extend", heads={"head_dims": {32, 64, 128}})

    def finish(self, out, rows):
        return out if rows.layer.head_dim // 16 // 4 else torch.empty_like(out)


@bug("HipKittens #22", "extend-gqa4x2-d64-bf16-p16-k0.1.16-n11a15.16.2-shared-shifted-b3prod", "output-written")
class HeadsSwizzledAsASquare(Tiled):
    """Blocks choose heads as if there were as many groups as a group has heads, so some heads are computed twice and
    others never.
    """

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})

    def finish(self, out, rows):
        group, heads = rows.layer.q_per_kv, rows.layer.tp_q_head_num
        done = torch.empty_like(out)
        for block in range(heads):
            head = block % group * group + block // group
            if head < heads:
                done[:, head] = out[:, head]
        return done


@bug("ONNXim #33", "extend-gqa4x2-d64-bf16-p16-k0.1.16-n11a15.16.2-shared-shifted-b3prod")
class KVHeadByNumberOfKVHeads(Tiled):
    """A query head's KV head is head // KV heads, where it is head // group."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})

    def kv_head(self, layer, device):
        heads = torch.arange(layer.tp_q_head_num, device=device) // layer.tp_k_head_num
        return heads.clamp(max=layer.tp_k_head_num - 1)


@bug("sglang-jax #1074", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "reads-own-kv")
class PageOfOnePackedAsTwo(Tiled):
    """The page size is rounded up to 2: pages of one token are addressed wrongly."""

    def slots(self, plan):
        size = plan.page_size + plan.page_size % 2
        if size == plan.page_size:
            return super().slots(plan)
        table = plan.page_table.long()
        index = torch.arange(table.shape[1], device=table.device)
        return (table[:, index // size] * size + index % size).clamp(max=self.context.kv_pool.num_slots - 1)


@bug(
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
    "tt-metal #54742",
    "extend-gqa2x2-d64-bf16-p16-k15.16.17-n45a3.131.1-chunks3-shared-shifted-kvhnd-layers1from5-b6nan",
    "writes-own-kv",
    execution="graph",
)
class WriterWalksOverTheEndOfAPage(Tiled):
    """The writer goes one row on for the second of two tokens that follow each other, over the end of a page."""

    capabilities = declared("decode", "extend", kv_pool={"kv_layouts": {"nhd", "hnd"}, "page_sizes": {16}})

    def write_kv(self, k, v, plan):
        pool = self.context.group_of(plan.layer).kv_pool
        if pool.layout == "nhd":
            super().write_kv(k, v, plan)
            return
        memory = pool.get_layer_buffer(plan.layer.layer_id)
        _, _, heads, size, dim = memory.shape
        slot = plan.out_cache_loc.long()
        address = slot // size * heads * size + slot % size
        follows = torch.zeros(len(slot), dtype=torch.bool, device=slot.device)
        follows[1::2] = slot[1::2] == slot[: len(slot) // 2 * 2 : 2] + 1
        address = torch.where(follows, torch.cat([address[:1], address[:-1]]) + 1, address)
        rows = address[:, None] + torch.arange(heads, device=slot.device) * size
        for side, new in zip(memory, (k, v), strict=True):
            flat = side.view(-1, dim)
            flat.index_put_((rows.clamp(max=len(flat) - 1),), new)


@bug("pytorch #182593", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-shared-gauss-b7prod", "reads-own-kv")
class TwoPagesTakenForOneBlock(Tiled):
    """A block of the mask is two pages, and they are taken to lie behind each other in memory."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16, 32}})

    def slots(self, plan):
        if plan.page_size >= 32:
            return super().slots(plan)
        table, size = plan.page_table.long(), plan.page_size
        column = torch.arange(table.shape[1], device=table.device)
        pages = self.context.kv_pool.num_slots // size
        together = (table[:, column // 2 * 2] + column % 2).clamp(max=pages - 1)
        return (together[:, :, None] * size + torch.arange(size, device=table.device)).flatten(1)


@bug("TensorRT-LLM #6573", "extend-gqa16x2-d64-bf16-p1-k600.70.12-n6a9.7.1-shared-gauss-b6nan")
class GroupsOfMoreThanEight(Tiled):
    """In groups of more than 8 the heads from the ninth on get results of the first ones."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {4, 8, 16}})

    def finish(self, out, rows):
        group = rows.layer.q_per_kv
        head = torch.arange(rows.layer.tp_q_head_num, device=out.device)
        return out[:, head // group * group + head % group % 8]


@bug("llama.cpp #19115", "decode-gqa3x2-d64-bf16-p1-k0.1.8-shuffled-peaked-b3prod")
class GroupPaddedToPowerOfTwo(Tiled):
    """The group is padded to a power of 2, so groups of 3 and 6 read wrong KV heads."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 3, 4, 6}})

    def kv_head(self, layer, device):
        return torch.arange(layer.tp_q_head_num, device=device) // (1 << (layer.q_per_kv - 1).bit_length())


@bug(
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


@bug("FlagGems #5235", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod", "output-written")
class CombinedRowsAtHeadSize(Tiled):
    """Rows of a tile are written one head size apart, where the output has a stride: later tokens land elsewhere."""

    capabilities = declared("decode", "target-verify", "extend")

    def finish(self, out, rows):
        if rows.plan.max_q_len == 1:
            return out
        t, h, d = out.shape
        flat = torch.arange(t * h, device=out.device)
        first = flat // 4 * 4
        at = first + (flat - first) * h
        done = torch.cat([torch.empty_like(out).view(t * h, d), torch.empty_like(out[0, :1])])
        done.index_put_((at.clamp(max=t * h),), out.reshape(t * h, d))
        return done[:-1].view(t, h, d)


@bug(
    "vLLM #40859, vLLM #40766",
    "extend-gqa2x2-d64-bf16-p16-k37.3.0.16.9.33.1.17.5-n3a19.1x8-chunks3-reversed-gauss-b10prod",
)
class SingleTokensExpectedFirst(Tiled):
    """In a mixed batch, rows of requests with one token are expected before all other rows."""

    capabilities = declared("extend")

    def run(self, q, kv, plan):
        several = plan.cu_seqlens_q.diff()[self.rows_of(q, plan).request] > 1
        order = torch.argsort(several.int(), stable=True)
        expected = torch.empty_like(q).index_copy(0, order, q)
        return super().run(expected, kv, plan)[order]


@bug(
    "sglang #15469",
    "draft-decode-gqa2x2-d64-bf16-p1-k21.3.0.8.9.33.1.17.5-topk2steps3-contiguous-gauss-b9prod",
    "reads-own-kv",
)
class PagesOfABranchTakenAsContiguous(Tiled):
    """The pages of a draft's branch are taken to lie behind its first one in memory."""

    capabilities = declared("draft-decode", bounds={"max_draft_branches": 2})

    def slots(self, plan):
        size, right = plan.page_size, super().slots(plan)
        prefix = plan.step.draft_prefixes.long().repeat_interleave(plan.step.draft.topk)
        begin = (prefix // size * size)[:, None]
        index = torch.arange(right.shape[1], device=right.device)
        first = right.gather(1, prefix[:, None].clamp(max=right.shape[1] - 1)) // size
        own = (first + (index - begin) // size) * size + index % size
        return torch.where(index >= begin, own, right).clamp(0, self.context.kv_pool.num_slots - 1)


@bug("flash-attention #2666", "decode-gqa2x2-d256-bf16-p16-k3.37.9.17-shared-gauss-b5stale")
class StridesFromShapesAtHeadDim256(Tiled):
    """The kernel of head dim 256 takes strides from shapes: queries that are a view are read wrongly."""

    capabilities = declared("decode", "extend", heads={"head_dims": {64, 256}})

    def query(self, q, plan):
        _, heads, dim = q.shape
        return q.as_strided(q.shape, (heads * dim, dim, 1)) if dim == 256 else q


@bug(
    "sglang #20389",
    "extend-gqa2x2-d64-bf16-p16-"
    "k106.107.108.109.110.111.112.113.114.115.116.117.118.119.120.121.122.123.124.125.126.127.128.1.2.3.4.5.6.7.8.9.10.11.12.13.14.15.16.17.18.19.20.21.22.23-n2a2x46-shuffled-gauss-b48prod",
)
class RowOffsetOverflows(Tiled):
    """Row times stride overflows. 32 bits there, 16 bits here, as such a batch is too large for a test."""

    def query(self, q, plan):
        offset = torch.arange(len(q), device=q.device) * q.stride(0) % 65536
        return q[offset // max(q.stride(0), 1)]


@bug(
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


@bug("vLLM #438", "decode-gqa2x2-d256-fp32-p16-k1025.33-shuffled-gauss-layers1from0-b2prod")
class SecondHalfOfPagesIgnored(Tiled):
    """A row of values has more vectors than a warp has lanes: values of the second half of a page are ignored."""

    capabilities = declared(
        "decode",
        "extend",
        precision={"dtypes": {"fp32", "bf16"}},
        heads={"head_dims": {64, 256}},
        kv_pool={"page_sizes": {16}},
    )

    def weigh(self, p, v):
        if self.context.dtype is torch.float32 and v.shape[-1] > 128:
            p = p * (torch.arange(p.shape[-1], device=p.device) % 16 < 8)
        return super().weigh(p, v)


@bug(
    "vllm-ascend #11791",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "writes-own-kv",
)
class LayerThatSharesKVWrites(Tiled):
    """The write is not left out where a layer shares the KV of another."""

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, out=None):
        return super().forward(q, k, v, layer, batch, True, out)


@bug("sglang #34765", "decode-mla16-d512r64-bf16-p1-k7.8.9-shared-one_hot-kvfp8e4m3-b3prod", "writes-own-kv")
class Fp8LatentWrittenUnscaled(Tiled):
    """A latent of FP8 is written with scale 1, and read with the scale of keys in the first product alone."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {4, 16}, "head_dims": {512}},
        kv_pool={"kv_dtypes": {"fp8_e4m3", "same"}},
    )

    def write_kv(self, k, v, plan):
        pool = self.context.group_of(plan.layer).kv_pool
        pool.set_kv_buffer(replace(plan.layer, k_scale=1.0, v_scale=1.0), plan.out_cache_loc, k, v)

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, v_scale=1.0)))


@bug("llama.cpp #7903", "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod")
class SurplusRowsOfATileWritten(Tiled):
    """Rows are padded to tiles of 4 or 8 and their bounds are not checked: surplus ones are written over the next."""

    capabilities = declared("decode", "target-verify")

    def finish(self, out, rows):
        n = rows.plan.max_q_len
        tile = n if n <= 2 else 4 if n <= 4 else 8
        done = out.clone()
        for surplus in range(-n % tile):
            at = torch.arange(n + surplus, len(out), n, device=out.device)
            done[at] = out[(at - surplus - 1).clamp(min=0)]
        return done
