"""Where something is read or written: pages, heads, strides, slots; bugs of the fifth set."""

from __future__ import annotations

import torch
from fifth_parents_split import SplitKV
from fifth_parents_varlen import Varlen
from plain_backends import Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug


@bug(
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


@bug("xformers #379", "decode-gqa2x2-d256-bf16-p16-k0x3-reversed-rising_logits-b6small", "output-written")
class ColumnOffset(Tiled):
    """The output tile of columns from 128 on is stored at column 0."""

    capabilities = declared("decode", "extend", heads={"head_dims": {64, 128, 256}})

    def finish(self, out, rows):
        if out.shape[-1] <= 128:
            return out
        stored = torch.empty_like(out)
        stored[..., :128] = out[..., 128:256]
        return stored


@bug("flash-attention #1562", "extend-gqa2x2-d64-bf16-p16-k0x3-n13a35.1.2-contiguous-shifted-b6prod", "writes-own-kv")
class ContiguousV(Tiled):
    """A view of V whose last stride is 1 is taken as contiguous."""

    capabilities = declared("decode", "extend")

    def write_kv(self, k, v, plan):
        t, h, d = v.shape
        super().write_kv(k, torch.as_strided(v, (t, h, d), (h * d, d, 1), v.storage_offset()), plan)


@bug(
    "llmman #118",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "writes-own-kv",
)
class AccumulatingWriter(Tiled):
    """New rows are added to what their slots held."""

    capabilities = declared("decode", "extend")

    def write_kv(self, k, v, plan):
        pool = self.context.kv_pool.get_kv_buffer(plan.layer.layer_id)
        held = (side[plan.out_cache_loc.long()] for side in pool)
        super().write_kv(k + next(held), v + next(held), plan)


@bug(
    "tt-metal #52671",
    "decode-gqa2x2-d64-bf16-p1-k3x45.1x43.9x44-shuffled-gauss-b132prod",
    "writes-own-kv",
    execution="graph",
)
class TilePadWriter(Tiled):
    """Of more than 32 requests, no multiple of 32: rows that fill the last tile are stored in slots of the first."""

    capabilities = declared("decode")

    def write_kv(self, k, v, plan):
        super().write_kv(k, v, plan)
        more = -len(k) % 32 if len(k) > 32 else 0
        zeros = torch.zeros_like(k[:more]), torch.zeros_like(v[:more])
        self.context.kv_pool.set_kv_buffer(plan.layer, plan.out_cache_loc[:more], *zeros)


@bug(
    "vllm #45111", "extend-gqa2x2-d64-bf16-p16-k33.24.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod", "reads-own-kv"
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


@bug("sglang #27360", "draft-decode-gqa2x2-d64-bf16-p2-k600.70.12-topk3steps6-reversed-negative-b4nan", "reads-own-kv")
class DraftScatter(Tiled):
    """A step's table is wide enough for that step, and pages of all steps are written: the next row gets the rest."""

    capabilities = declared("draft-decode", bounds={"max_draft_branches": 4}, kv_pool={"page_sizes": {1, 2, 16}})

    def slots(self, plan):
        draft, size = plan.step.draft, plan.page_size
        if draft is None or draft.topk < 2 or size == 1:
            return super().slots(plan)
        given = plan.page_table.long()
        table, last = given.clone(), given.shape[1] - 1
        prefix = plan.step.draft_prefixes.long().repeat_interleave(draft.topk)
        column, width = prefix // size, draft.step + 2
        pages = (prefix % size + draft.num_steps - 1) // size + 1
        row = torch.arange(len(table) - 1, device=table.device)
        for behind in range((size + draft.num_steps - 2) // size + 1 - width):
            to = (column[1:] + behind).clamp(max=last)
            page = given[row, (column[:-1] + width + behind).clamp(max=last)]
            table[row + 1, to] = torch.where(pages[:-1] > width + behind, page, table[row + 1, to])
        offset = torch.arange(size, device=table.device)
        return (table[:, :, None] * size + offset).flatten(1)


@bug("HipKittens #22", "decode-gqa8x2-d64-bf16-p16-k7x2-contiguous-shifted-b3nan", "output-written")
class SquareGroups(Tiled):
    """Blocks are given heads as if there were as many KV heads as heads in a group: some heads have no block."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4, 8}})

    def finish(self, out, rows):
        heads, group = out.shape[1], rows.layer.q_per_kv
        block = torch.arange(heads, device=out.device)
        head = block % group * group + block // group
        done = (block[:, None] == head).any(1)
        return torch.where(done[:, None], out, torch.empty_like(out))


@bug(
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


@bug("vllm #14597", "decode-mqa4-d64-bf16-p1-k255.256.511.512.1023.1024-shuffled-plus_minus_one-b6prod", "completes")
class TableGroups(Varlen):
    """Page ids are loaded eight at a time: the last eight of the last row reach past the table's end."""

    def pages(self, meta, request):
        width, size = meta.table.shape[1], self.context.page_size
        first = torch.arange(-(-width // 8) * 8, device=request.device) // 8 * 8
        needed = (meta.lens[request].long() + size - 1) // size
        at = request[:, None] * width + torch.arange(len(first), device=request.device)
        return meta.table.reshape(-1)[torch.where(first < needed[:, None], at, 0)].long()


@bug("tt-metal #37927", "decode-mqa4-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "reads-own-kv")
class ChunkOfPages(Varlen):
    """A tile of 32 keys takes two pages of 16 slots to lie one behind the other."""

    def pages(self, meta, request):
        pages = super().pages(meta, request)
        if self.context.page_size != 16:
            return pages
        column = torch.arange(pages.shape[1], device=pages.device)
        return (pages[:, column // 2 * 2] + column % 2).clamp(max=self.context.kv_pool.num_slots // 16 - 1)


@bug(
    "flash-attention #1217",
    "draft-extend-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1-n2a2x7-shuffled-gauss-b7prod",
    execution="graph",
)
class CombineFixedQ(SplitKV):
    """The kernel that merges splits computes the row as request * longest + position."""

    def finish(self, out, rows):
        longest = rows.plan.cu_seqlens_q.diff().max()
        return out[(rows.request * longest + rows.place).clamp(max=len(out) - 1)]


@bug(
    "FastDeploy #8043",
    "decode-gqa2x4-d128-fp16-p4-k15.22.6-contiguous-gauss-kvfp8e4m3-w7-cap1.5-"
    "sink-layers3from5groupsby8x4d64.8x2d128-b4prod",
    "completes",
    execution="graph",
)
class PerLayerHeads(SplitKV):
    """Memory that layers share is as large as the layers with the most KV heads need it."""

    def row_size(self):
        layers = self.context.layers
        most = max(layer.tp_k_head_num for layer in layers)
        return max(layer.tp_q_head_num * layer.v_head_dim for layer in layers if layer.tp_k_head_num == most)
