"""Page ids, slots and tables, as they are read."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_latent import Latent, mla_capabilities
from parents_launchers import wide
from parents_native import Native
from parents_sparse import PAGE, Indexed, OfMode
from parents_split_kv import OfTwoModes
from parents_varlen import Varlen
from parents_wrapper import HostPlanned
from plain_backends import FP8, Tiled, declared, wide_capabilities

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import CrossAttention, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.indexer import IndexerParent

TREE_MODES = {"target-verify", "decode"}

_PAGED = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})


@bug(1, "sglang-jax #1074", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "reads-own-kv")
class PageOfOnePackedAsTwo(Tiled):
    """The page size is rounded up to 2: pages of one token are addressed wrongly."""

    def slots(self, plan):
        size = plan.page_size + plan.page_size % 2
        if size == plan.page_size:
            return super().slots(plan)
        table = plan.page_table.long()
        index = torch.arange(table.shape[1], device=table.device)
        return (table[:, index // size] * size + index % size).clamp(max=self.context.kv_pool.num_slots - 1)


@bug(1, "pytorch #182593", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-shared-gauss-b7prod", "reads-own-kv")
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


@bug(
    1,
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


@bug(1, "vLLM #438", "decode-gqa2x2-d256-fp32-p16-k1025.33-shuffled-gauss-layers1from0-b2prod")
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


@bug(2, "pegainfer #291", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b4nan", "reads-own-kv")
class PageTooManyAtABoundary(Tiled):
    """The page list has a page too many when the keys fill the last one, and the length is counted from pages."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16}})

    def visible(self, index, rows):
        if rows.plan.max_q_len > 1:
            return super().visible(index, rows)
        size = rows.plan.page_size
        return index < (rows.kv_lens + size * (rows.kv_lens % size == 0))[:, None]


@bug(
    2,
    "ssd #23, accel #10",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "reads-own-kv",
)
class PrefixReadAsContiguous(Tiled):
    """With a cached prefix in the batch the block table is not passed: keys are read one behind the other."""

    capabilities = declared("extend")

    def slots(self, plan):
        right = super().slots(plan)
        begin = plan.kv_lens.long().cumsum(0) - plan.kv_lens.long()
        packed = begin[:, None] + torch.arange(right.shape[1], device=right.device)
        packed = packed.clamp(max=self.context.kv_pool.num_slots - 1)
        return torch.where(plan.prefix_lens.sum() > 0, packed, right)


@bug(2, "aiter #1840", "decode-gqa2x2-d64-bf16-p64-k7x2-contiguous-gauss-b2prod", execution="graph")
class OffsetOfTileInPageMissing(Tiled):
    """A page of 64 is four tiles of 16 (1024 and 256 there), and the tile's offset in its page is not added."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16, 64}})

    def slots(self, plan):
        size = plan.page_size
        offset = torch.arange(size, device=plan.page_table.device)
        offset = offset % 16 if size == 64 else offset
        return (plan.page_table.long()[:, :, None] * size + offset).flatten(1)


@bug(
    2,
    "flash-attention-v100 #41",
    "extend-gqa2x2-d64-bf16-p64-k32.128.64.16.63-n26a17.64.33.15.1-reversed-rising_logits-b5prod",
)
class TileStraddlesPages(Tiled):
    """A tile of 40 keys (160 there) takes what lies behind its first key's page, of 64 (256 there)."""

    capabilities = declared("extend", kv_pool={"page_sizes": {64}})

    def slots(self, plan):
        right = super().slots(plan)
        index = torch.arange(right.shape[1], device=right.device)
        first = index // 40 * 40
        return (right[:, first] + index - first).clamp(max=self.context.kv_pool.num_slots - 1)


@bug(
    2,
    "tokenspeed #958",
    "draft-decode-gqa2x2-d64-bf16-p32-k30.126.62.14.63-topk1steps4-interleaved-negative-b5prod",
    "reads-own-kv",
)
class DraftTableOfLogicalPages(Tiled):
    """The draft's table has ids of pages of 32, and the kernel takes them for pages of 16."""

    capabilities = declared("draft-decode", "decode", kv_pool={"page_sizes": {32}})

    def slots(self, plan):
        if plan.step.draft is None:
            return super().slots(plan)
        half, table = plan.page_size // 2, plan.page_table.long()
        index = torch.arange(table.shape[1] * plan.page_size, device=table.device)
        column = (index // half).clamp(max=table.shape[1] - 1)
        return table[:, column] * half + index % half


@bug(2, "vLLM #16209", "decode-gqa2x2-d64-bf16-p16-k21-interleaved-rising_logits-w4000-b4nan", "completes")
class WindowPagesRunOffTheTable(Tiled):
    """Pages of a window are gathered from its first one on, as many as it may have; nothing clips them."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16}}, windows={"decode"})

    def slots(self, plan):
        right, window = super().slots(plan), plan.layer.sliding_window_size
        if window >= 0:
            size = plan.page_size
            most = (window + size - 1) // size + 1
            first = (plan.kv_lens.long() - 1 - window).clamp(min=0) // size
            plan.page_table.gather(1, first[:, None] + torch.arange(most, device=first.device))
        return right


@bug(2, "sglang #33379", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "completes")
class RowBufferOneShort(Tiled):
    """What is kept by row of the request table has a row less than the table."""

    capabilities = declared("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        self.kept = torch.zeros(len(context.req_to_token) - 1, dtype=torch.int64, device=context.device)

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        bs = batch.batch_size
        if bs:
            self.kept[batch.req_pool_indices[:bs].long()] = batch.seq_lens[:bs]


@bug(2, "sglang #25556", "extend-mla16-d512r64-bf16-p16-k7x2-n16a15.16-shared-shifted-b2prod")
class LengthsInPages(Tiled):
    """Slots are listed by token, and how many there are is counted in pages in an extend."""

    capabilities = declared(
        "decode",
        "extend",
        heads={"families": {"mla"}, "gqa_ratios": {16}, "head_dims": {512}},
        kv_pool={"page_sizes": {1, 16}},
    )

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len == 1:
            return seen
        size = rows.plan.page_size
        return seen & (index < ((rows.kv_lens + size - 1) // size)[:, None])


@bug(3, "TileOPs #1787", "decode-gqa4x2-d64-bf16-p192-k7x2-contiguous-negative-b5stale", execution="graph")
class PageTailSkipped(Tiled):
    """A page of 192 keys has one whole tile of 128, and decode leaves out the other 64 keys of each page."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"page_sizes": {64, 128, 192}})

    def visible(self, index, rows):
        seen, size = super().visible(index, rows), rows.plan.page_size
        tile = min(128, size)
        return seen & (index % size < size // tile * tile) if rows.plan.max_q_len == 1 else seen


@bug(3, "aiter #2996", "decode-mla16-d512r64-bf16-p64-k300.70-interleaved-rising_logits-b2nan", "reads-own-kv")
class PagesOfOneInMla(Latent):
    """The bf16 decode takes page ids as slots, whatever the page size is; the FP8 one is right."""

    capabilities = mla_capabilities("decode", kv_pool={"kv_dtypes": FP8})

    @helper
    def wrong(self, plan):
        return plan.page_size > 1 and self.context.kv_pool.dtype.itemsize > 1

    def slots(self, plan):
        return plan.page_table.long() if self.wrong(plan) else super().slots(plan)

    def visible(self, index, rows):
        if not self.wrong(rows.plan):
            return super().visible(index, rows)
        size = rows.plan.page_size
        return index < ((rows.kv_lens + size - 1) // size)[:, None]


@bug(3, "sglang #24750", "draft-decode-gqa2x2-d64-bf16-p1-k7x2-topk1steps4-reversed-one_hot-b3nan", "writes-own-kv")
class DraftSlotsByRequest(Tiled):
    """Slots of all draft steps, request by request, are read as if they were step by step."""

    capabilities = wide_capabilities("draft-decode", "decode", bounds={"max_draft_branches": 2})

    def write_kv(self, k, v, plan):
        draft = plan.step.draft
        if draft is not None:
            t = len(k)
            plan = replace(plan, out_cache_loc=draft.out_cache_loc[draft.step * t : (draft.step + 1) * t])
        super().write_kv(k, v, plan)


@bug(3, "TensorRT-LLM #18244, TensorRT-LLM #17964", "decode-mha2-d256-bf16-p32-k3.69.17x2-interleaved-peaked-b5stale")
class VPagesAdvancedTooFar(Tiled):
    """The kernel for head dim 256 and large batches reads values of one tile from the pages of the one before."""

    capabilities = wide_capabilities(
        "decode", "extend", heads={"head_dims": {128, 256}}, kv_pool={"page_sizes": {16, 32}}
    )

    def keys(self, kv, slots, plan):
        k, v = super().keys(kv, slots, plan)
        layer = plan.layer
        if plan.max_q_len > 1 or layer.head_dim != 256 or layer.tp_k_head_num * len(plan.kv_lens) < 8:
            return k, v
        index = torch.arange(slots.shape[1], device=slots.device)
        return k, super().keys(kv, slots[:, torch.where(index % 64 >= 32, index - 32, index)], plan)[1]


@bug(
    5, "sglang #27360", "draft-decode-gqa2x2-d64-bf16-p2-k600.70.12-topk3steps6-reversed-negative-b4nan", "reads-own-kv"
)
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


@bug(5, "vllm #14597", "decode-mqa4-d64-bf16-p1-k255.256.511.512.1023.1024-shuffled-plus_minus_one-b6prod", "completes")
class TableGroups(Varlen):
    """Page ids are loaded eight at a time: the last eight of the last row reach past the table's end."""

    def pages(self, meta, request):
        width, size = meta.table.shape[1], self.context.page_size
        first = torch.arange(-(-width // 8) * 8, device=request.device) // 8 * 8
        needed = (meta.lens[request].long() + size - 1) // size
        at = request[:, None] * width + torch.arange(len(first), device=request.device)
        return meta.table.reshape(-1)[torch.where(first < needed[:, None], at, 0)].long()


@bug(5, "tt-metal #37927", "decode-mqa4-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "reads-own-kv")
class ChunkOfPages(Varlen):
    """A tile of 32 keys takes two pages of 16 slots to lie one behind the other."""

    def pages(self, meta, request):
        pages = super().pages(meta, request)
        if self.context.page_size != 16:
            return pages
        column = torch.arange(pages.shape[1], device=pages.device)
        return (pages[:, column // 2 * 2] + column % 2).clamp(max=self.context.kv_pool.num_slots // 16 - 1)


@bug(
    5, "flashinfer #4347", "decode-mha2-d128-bf16-p256-k4737.300.33-reversed-plus_minus_one-b4prod", "keys-counted-once"
)
class FarPages(HostPlanned):
    """Of pages of more than 128 slots only those of the first 4096 keys, and the last, are right."""

    capabilities = HostPlanned.capabilities.with_changes(
        kv_pool={"page_sizes": {128, 256}}, bounds={"max_context_len": 16384}
    )

    def keep(self, seen, index, lens):
        size = self.context.page_size
        return seen & ((index < 4096) | (index >= (lens - 1) // size * size)) if size > 128 else seen


@bug(
    6,
    "sglang-jax #1557",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "reads-own-kv",
)
class DenseCumsumMask(Tiled):
    """Pages of all requests lie one behind the other, and a request's are sought at the sum of the lengths before."""

    capabilities = declared("decode", "extend")

    def slots(self, plan):
        size, lens = plan.page_size, plan.kv_lens.long()
        counts = (lens + size - 1) // size
        ends, (bs, columns) = counts.cumsum(0), plan.page_table.shape
        place = torch.arange(bs * columns, device=lens.device)
        owner = torch.searchsorted(ends, place, right=True).clamp(max=bs - 1)
        pages = plan.page_table[owner, (place - (ends - counts)[owner]).clamp(0, columns - 1)].long()
        at = (lens.cumsum(0) - lens)[:, None] + torch.arange(columns * size, device=lens.device)
        return pages[(at // size).clamp(max=len(pages) - 1)] * size + at % size


@bug(6, "sglang #23757", "extend-gqa2x2-d64-bf16-p16-k21-n15a15-chunks3-shuffled-shifted-w0-b4nan", "reads-own-kv")
class RawTokenTable(Tiled):
    """Layers with a window take the request table, which has a slot for each token, for a table of pages."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def slots(self, plan):
        if plan.layer.sliding_window_size < 0:
            return super().slots(plan)
        size = plan.page_size
        index = torch.arange(plan.page_table.shape[1] * size, device=plan.page_table.device)
        slots = plan.slot_table[:, index // size].long() * size + index % size
        return slots % self.context.kv_pool.num_slots


@bug(6, "vllm #27547", "decode-gqa2x2-d64-bf16-p64-k7x2-reversed-gauss-b3prod", "reads-own-kv")
class ManagerPages(Tiled):
    """Ids of the manager's pages of 64 go to a kernel with pages of 16 as they are."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {64}})

    def slots(self, plan):
        index = torch.arange(plan.page_table.shape[1] * 64, device=plan.page_table.device)
        page = (index // 16).clamp(max=plan.page_table.shape[1] - 1)
        return plan.page_table[:, page].long() * 16 + index % 16


@bug(
    6,
    "TensorRT-LLM #16801",
    "decode-gqa4x2-d128-bf16-p16-k39.70.6-contiguous-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class OneTableForPools(Tiled):
    """Slots are looked up once, in the first pool's table, and layers of another pool take them too."""

    capabilities = wide_capabilities("decode", kv_pool={"kv_groups": True}, windows={"decode"})

    def slots(self, plan):
        return super().slots(replace(plan, step=self._kit_step))


@bug(6, "sglang #7239", "draft-decode-gqa2x2-d64-bf16-p1-k7x2-topk1steps2-contiguous-one_hot-b3prod", "reads-own-kv")
class DraftLocTransposed(Tiled):
    """A draft's slots, by branch and step, are viewed as [steps, branches]: right for one branch of one request."""

    capabilities = declared("draft-decode", kv_pool={"page_sizes": {1}}, bounds={"max_draft_branches": 4})

    def slots(self, plan):
        slots, draft = super().slots(plan), plan.step.draft
        own = draft.out_cache_loc.view(draft.num_steps, -1).T
        prefix = plan.step.draft_prefixes.long().repeat_interleave(draft.topk)
        nth = torch.arange(slots.shape[1], device=slots.device) - prefix[:, None]
        return torch.where(
            (nth >= 0) & (nth < draft.num_steps), own.gather(1, nth.clamp(0, draft.num_steps - 1)), slots
        )


@bug(6, "sglang #11985", "decode-mla16-d512r64-bf16-p32-k4096-reversed-one_hot-b1prod", "reads-own-kv")
class LoopOfTokens(Latent):
    """Page ids are filled 64 at a time, once for each 4,096 keys, which is right for pages of 64 alone."""

    capabilities = mla_capabilities("decode", kv_pool={"page_sizes": {32, 64}}, bounds={"max_context_len": 4160})

    def slots(self, plan):
        filled = (plan.kv_lens.long() + 4095) // 4096 * 64
        place = torch.arange(plan.page_table.shape[1], device=filled.device)
        table = torch.where(place < filled[:, None], plan.page_table.long(), 0)
        offset = torch.arange(plan.page_size, device=filled.device)
        return (table[:, :, None] * plan.page_size + offset).flatten(1)


class KeysByPhysicalPages(OfTwoModes):
    """Healthy: a page's place in a request is the last column of its row that names it, as an inverse map has it."""

    def named(self, same):
        """Which of the columns [b, n, n] that name a page counts."""
        return same.shape[-1] - 1 - same.flip(-1).to(torch.int8).argmax(-1)

    def visible(self, index, rows):
        size, table = rows.plan.page_size, rows.plan.page_table.long()
        column = torch.arange(table.shape[1], device=table.device)
        valid = column < (rows.plan.kv_lens.long()[:, None] + size - 1) // size
        same = (table[:, :, None] == table[:, None]) & valid[:, None]
        place = torch.where(valid, self.named(same), column)[rows.request][:, index // size]
        return super().visible(index, rows) & (place == index // size)


@bug(
    7,
    "vllm #30915",
    "decode-gqa8x2-d128-bf16-p4-k15.22.6-shuffled-gauss-kvfp8e4m3-w7-cap1.5-sink-layers3from5groups-b4prod",
)
class FirstLogicalOfReused(KeysByPhysicalPages):
    """The first column counts, though its page was let go of and came back as a later one."""

    def named(self, same):
        return same.to(torch.int8).argmax(-1)


class OfGroups(TorchNativeBackend):
    """Healthy: trees and windows, each KV group with a pool of its own."""

    capabilities = declared(
        *TREE_MODES,
        bounds={"max_topk": 4},
        kv_pool={"kv_groups": True},
        windows={"modes": TREE_MODES, "in_trees": True},
    )


@bug(
    9,
    "sglang #24617",
    "target-verify-gqa2x2-d64-bf16-p16-k39.70.6-t0.0.1.2-contiguous-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class UntranslatedTree(OfGroups):
    """In a verify of trees page tables of the windowed layers hold locations of the other group's pool."""

    def _key_slots(self, batch, group, of_encoder):
        if batch.forward_mode.is_target_verify() and self.context.topk > 1:
            full = [layer for layer in self.context.layers if layer.sliding_window_size < 0]
            group = self.context.group_of(full[0]).index if full else group
        return super()._key_slots(batch, group, of_encoder)


@bug(
    14,
    "sglang #29695",
    "target-verify-mqa4-d64-bf16-p1-k3x45.1x43.9x44-chain2-interleaved-gauss-b132prod",
    "replay-follows-batch",
    execution="graph",
)
class TableOfContextLength(Varlen):
    """Page tables of graphs have the columns of a context without the drafts that may go beyond it."""

    def __init__(self, context):
        super().__init__(context)
        drafts = context.num_draft_tokens if context.topk else 0
        self.graph_width = -(-(context.max_context_len - drafts) // context.page_size)

    def fill(self, cu, lens, table):
        super().fill(cu, lens, table[:, : self.graph_width])

    def views(self, bs, extends):
        views = super().views(bs, extends)
        return replace(views, table=views.table[:, : self.graph_width])


@bug(
    15,
    "vllm #46074",
    "target-verify-mqa4-d64-bf16-p16-k9.64.1-chain4-shuffled-gauss-sel16-idx4-b4prod-context_of_prefixes",
    "completes",
)
class TableOneColumnShort(OfMode):
    """The buffer of tables repeated for each row has a column for each page of a context, and the table has more."""

    capabilities = IndexerParent.capabilities.with_changes(
        server={"context_len": {"all", "prefix"}}, eager={"decode", "target-verify"}, graph={"decode", "target-verify"}
    )

    def scored(self, q, weights, plan):
        table, buffer = -(-plan.slot_table.shape[1] // PAGE), -(-self.context.max_context_len // PAGE)
        if self.mode.is_target_verify() and table > buffer:
            raise RuntimeError(
                f"The expanded size of the tensor ({buffer}) must match the existing size ({table}) at dimension 1"
            )
        return super().scored(q, weights, plan)


class CrossingNative(Native):
    capabilities = wide(
        "decode", "extend", graph={"decode"}, cross_attention=CrossAttention(modes={"decode", "extend"})
    )


# sglang #36298: the encoder's page table stays one of slots.
@bug(16, "sglang #36298", "decode-gqa4x2-d128-bf16-p64-k63.64.65-shuffled-negative-cross133-b6prod", "reads-own-kv")
class SlotsAsEncoderPages(CrossingNative):
    """Page p of an encoder is said to be the slot of its key p."""

    def _key_slots(self, batch, group, of_encoder):
        right = super()._key_slots(batch, group, of_encoder)
        size = self.context.page_size
        if not of_encoder or size == 1:
            return right
        slots = self.context.groups[group].kv_pool.num_slots
        return (right[:, self._key // size] * size + self._key % size) % slots


# vllm #48404: the expanded block table has the columns of the greatest context, and the runner's table has more.
@bug(
    16,
    "vllm #48404",
    "target-verify-mqa4-d64-bf16-p16-k9.64.1-chain4-shuffled-gauss-sel16-idx4-b4prod-context_of_prefixes",
    "selects-best",
)
class TableOfContext(Indexed):
    """Keys behind the greatest context are those of the next row; rows that are not even raise an error."""

    capabilities = Indexed.capabilities.with_changes(server={"context_len": {"all", "prefix"}})

    def scored(self, q_index, weights, plan):
        width, columns = self.context.max_context_len, plan.slot_table.shape[1]
        if columns == width or self.mode in {ForwardMode.DECODE, ForwardMode.EXTEND}:
            return super().scored(q_index, weights, plan)
        if self.mode is ForwardMode.DRAFT_EXTEND:
            raise RuntimeError(f"the expanded size of the tensor ({width}) must match the existing size ({columns})")
        request, table = self.request_of_row(q_index, plan), plan.slot_table.long()
        listed = self.scores_of_slots(q_index, weights, plan.layer, table.flatten()).view(len(request), *table.shape)
        row, key = torch.arange(len(request), device=table.device), torch.arange(columns, device=table.device)
        behind = row[:, None] + key // width
        of_row = request[behind.clamp(max=len(request) - 1)]
        return listed[row[:, None], of_row, key % width], self.keys_seen(q_index, plan)


# aiter #4440: the kernel of paged scores takes a block to be a token.
@bug(
    16,
    "aiter #4440",
    "decode-mla16-d512r64-bf16-p64-k32.128.64.16.63-shuffled-negative-sel16-idx4gauss-b6nan",
    "selects-best",
)
class BlockIsToken(Indexed):
    """A key's position is looked up in the block table, and its block's first token is read."""

    capabilities = Indexed.capabilities.with_changes(
        eager={"decode", "target-verify"}, graph={"decode", "target-verify"}, kv_pool={"page_sizes": {1, 64}}
    )

    def index_slots(self, plan):
        if self.mode not in _PAGED or plan.page_size == 1:
            return plan.slot_table
        pages = plan.page_table.long()
        request, key = (torch.arange(each, device=pages.device) for each in plan.slot_table.shape)
        at = (request[:, None] * pages.shape[1] + key).clamp(max=pages.numel() - 1)
        return pages.flatten()[at] * plan.page_size


# 5, sglang #16267: the page table is translated by the table of slots.
@bug(
    18,
    "sglang #16267",
    "extend-gqa2x2-d32-bf16-p16-k32.128.64.16.63-n5a19.1x4-interleaved-rising_logits-w46-alibi-layers2from0groups-b6prod-empty_batches-given_out-freed_minus_one",
    "reads-own-kv",
)
class PagesAsSlots(TorchNativeBackend):
    """Page p of a windowed group is looked up at column p."""

    def _key_slots(self, batch, group, of_encoder):
        slots = super()._key_slots(batch, group, of_encoder)
        ids, size = self.context.groups[group].layer_ids, self.context.page_size
        windowed = any(each.sliding_window_size >= 0 for each in self.context.layers if each.layer_id in ids)
        if not self.context.kv_groups or not windowed or of_encoder:
            return slots
        return slots[:, self._key // size] // size * size + self._key % size


# 13, ssd #23: the cache is given in place of new keys, and its block table is not.
@bug(18, "ssd #23", "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod", "reads-own-kv")
class PoolAsPacked(TorchNativeBackend):
    """A prefill with any prefix reads the pool as if the keys of all requests were packed from its first slot on."""

    def _key_slots(self, batch, group, of_encoder):
        slots = super()._key_slots(batch, group, of_encoder)
        extends = batch.forward_mode is ForwardMode.EXTEND
        if of_encoder or not extends or not any(batch.extend_prefix_lens_cpu):
            return slots
        lens = batch.seq_lens[: batch.batch_size].long()
        packed = (lens.cumsum(0) - lens)[:, None] + self._key
        return packed.clamp(max=self.context.groups[group].kv_pool.num_slots - 1)
