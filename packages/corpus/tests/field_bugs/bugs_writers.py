"""New rows and outputs that are stored in a wrong place, twice, or not at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from parents_launchers import SPEC_V1_V2, Known, wide
from parents_native import Native
from parents_split_kv import OfTwoModes
from plain_backends import FP8, Tiled, declared, wide_capabilities

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit_corpus.faults.catalogue import bug, helper


@bug(
    1,
    "tt-metal #54742",
    "extend-gqa2x2-d64-bf16-p16-k15-n3a3-contiguous-gauss-kvhnd-b1prod",
    "writes-own-kv",
    execution="graph",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k15.16.17-n45a3.131.1-chunks3-shared-shifted-kvhnd-layers1from5-b6nan",
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


@bug(
    1,
    "FlagGems #5235",
    "target-verify-gqa2x2-d64-bf16-p1-k7.8.9-chain7-reversed-rising_logits-b3prod",
    "output-written",
)
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
    1,
    "vllm-ascend #11791",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod",
    "writes-own-kv",
)
class LayerThatSharesKVWrites(Tiled):
    """The write is not left out where a layer shares the KV of another."""

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, out=None):
        return super().forward(q, k, v, layer, batch, True, out)


@bug(
    2,
    "pytorch xla #8431",
    "decode-gqa2x2-d64-bf16-p16-k300.70-shuffled-rising_logits-b2prod",
    "output-written",
    execution="graph",
)
class OutputStoredUnlessExact(Tiled):
    """Block kv_len // 64 (256 upstream) stores the output, and no such block runs if 64 divides the length."""

    capabilities = declared("decode")

    def finish(self, out, rows):
        exact = rows.kv_lens % 64 == 0
        return torch.where(exact[:, None, None], torch.empty_like(out), out)


@bug(3, "vLLM #29887", "extend-gqa2x2-d64-bf16-p16-k32.128.64.16.63-n5a19.1x4-interleaved-shifted-kvfp8e4m3-b6nan")
class GatherWithoutHeadOffset(Tiled):
    """Gathering a cached prefix writes all heads of a token to the first head's place."""

    capabilities = wide_capabilities(
        "decode", "extend", heads={"families": {"mha", "gqa", "mqa"}}, kv_pool={"kv_dtypes": FP8}
    )

    def keys(self, kv, slots, plan):
        right = super().keys(kv, slots, plan)
        if plan.max_q_len == 1:
            return right
        rows = self.rows_of(slots, plan)
        old = (torch.arange(slots.shape[1], device=slots.device) < rows.prefix[:, None])[:, :, None, None]

        def gathered(side):
            side = side.float()
            lost = torch.zeros_like(side)
            lost[:, :, 0] = side[:, :, -1]
            return torch.where(old, lost, side)

        return tuple(map(gathered, right))


@bug(
    3,
    "vllm-xpu-kernels #429",
    "extend-gqa2x2-d64-bf16-p16-k21-n17a17-chunks3-contiguous-peaked-kvsidebyside-b1prod-overlap_scheduling",
    "writes-own-kv",
)
class RowsCopiedAsOneRun(Tiled):
    """Heads of a row are stored as one run, though in the side-by-side layout they are two widths apart."""

    capabilities = wide_capabilities(
        "decode", "extend", heads={"families": {"mha", "gqa", "mqa"}}, kv_pool={"kv_layouts": {"nhd", "side-by-side"}}
    )

    def write_kv(self, k, v, plan):
        pool = self.context.group_of(plan.layer).kv_pool
        if pool.layout == "nhd":
            super().write_kv(k, v, plan)
            return
        memory = pool.get_layer_buffer(plan.layer.layer_id)
        pages, size, heads, _, dim = memory.shape
        flat = memory.view(pages * size, heads * 2 * dim)
        slot = plan.out_cache_loc.long()
        flat[:, : heads * dim].index_put_((slot,), k.reshape(len(k), -1))
        flat[:, dim : dim + heads * dim].index_put_((slot,), v.reshape(len(v), -1))


@bug(3, "vllm-tt-plugin #74", "extend-gqa2x2-d64-bf16-p16-k7x2-n10a19.1-shared-peaked-b3prod", "writes-own-kv")
class ChunkStoredFromItsPage(Tiled):
    """A chunk is stored from the start of the page in which it begins."""

    capabilities = wide_capabilities("decode", "extend")

    def write_kv(self, k, v, plan):
        if plan.max_q_len > 1:
            rows, size = self.rows_of(k, plan), plan.page_size
            at = rows.prefix // size * size + rows.place
            slot = plan.slot_table.long()[rows.request, at.clamp(0, plan.slot_table.shape[1] - 1)]
            live = torch.arange(len(k), device=k.device) < plan.cu_seqlens_q[-1]
            plan = replace(plan, out_cache_loc=torch.where(live, slot, plan.out_cache_loc.long()))
        super().write_kv(k, v, plan)


@bug(4, "vllm-rbln #326", "target-verify-gqa4x2-d128-bf16-p64-k63.64.65-chain7-shared-negative-b6nan", "writes-own-kv")
class SpecStoreInOneBlock(Known):
    """All tokens of a step are stored in one physical block."""

    capabilities = wide("decode", "target-verify", kv_pool={"page_sizes": {16, 64}})

    def write_kv(self, k, v, plan):
        if self.mode == "target-verify":
            n, loc = plan.max_q_len, plan.out_cache_loc
            first = loc.view(-1, n)[:, :1]
            loc = (first + torch.arange(n, device=loc.device)).flatten()
            most = self.context.kv_pool.num_slots - 1
            plan = replace(plan, out_cache_loc=loc.clamp(max=most))
        super().write_kv(k, v, plan)


@bug(
    4, "onnxruntime #31641", "target-verify-gqa2x2-d128-bf16-p16-k0.1.16-chain7-shuffled-peaked-b3prod", "writes-own-kv"
)
class ShiftedAppend(Known):
    """T - 1 is taken as the past of several tokens."""

    capabilities = wide("decode", "target-verify")

    def write_kv(self, k, v, plan):
        if self.mode == "target-verify":
            n = plan.max_q_len
            at = (plan.kv_lens.long() - 1)[:, None] + torch.arange(n, device=k.device)
            at = at.clamp(0, plan.slot_table.shape[1] - 1)
            plan = replace(plan, out_cache_loc=plan.slot_table.gather(1, at).flatten().long())
        super().write_kv(k, v, plan)


@bug(4, "tokenspeed #1441", "draft-extend-gqa4x2-d128-bf16-p1-k7.8.9-n4a1x3-interleaved-mean-b6nan", "writes-own-kv")
class DraftRowsNotStored(Known):
    """The first draft step has no write locations."""

    capabilities = wide(*SPEC_V1_V2)

    def write_kv(self, k, v, plan):
        if self.mode not in ("draft-extend", "draft-extend-v2"):
            super().write_kv(k, v, plan)


@bug(4, "TileOPs #646", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "completes", execution="graph")
class OneVariantForAll(Known):
    """The output index of the variant that is compiled first is kept for the other."""

    capabilities = wide("decode")
    compiled = None

    def run(self, q, kv, plan):
        parameters = 6 if len(plan.kv_lens) >= 4 else 9  # no split, split
        self.compiled = self.compiled or parameters
        if self.compiled != parameters:
            raise RuntimeError("kernel: ndim mismatch of argument -1")
        return super().run(q, kv, plan)


@bug(5, "xformers #379", "decode-gqa2x2-d256-bf16-p16-k0x3-reversed-rising_logits-b6small", "output-written")
class ColumnOffset(Tiled):
    """The output tile of columns from 128 on is stored at column 0."""

    capabilities = declared("decode", "extend", heads={"head_dims": {64, 128, 256}})

    def finish(self, out, rows):
        if out.shape[-1] <= 128:
            return out
        stored = torch.empty_like(out)
        stored[..., :128] = out[..., 128:256]
        return stored


@bug(
    5,
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
    7,
    "vllm-ascend #6558",
    "decode-gqa8x2-d128-bf16-p64-k7x2-interleaved-rising_logits-kvfp8e4m3-w46-sink-layers2from5-b3nan-given_out",
    "output-written",
)
class WindowOutNotStored(OfTwoModes):
    """The windowed decode computes a new tensor, and the caller's is returned as it was."""

    capabilities = OfTwoModes.capabilities.with_changes(server={"takes_out": True})

    def run(self, q, kv, plan):
        done = super().run(q, kv, plan)
        windowed = self.mode.is_decode() and plan.layer.sliding_window_size >= 0
        return plan.out if plan.out is not None and windowed else done


@bug(
    13,
    "tt-metal #54413",
    "extend-gqa2x22-d16-bf16-p16-k0-n65a65-shuffled-gauss-layers1from0-b1prod",
    "writes-own-kv",
    of_a_tier="extend-gqa2x32-d16-bf16-p16-k3-n13a130-shuffled-gauss-b10prod",
)
class FillAcrossHeads(Tiled):
    """64 cores store blocks of 32 tokens of a head, a run of blocks each, and step forward from the first: where a run
    goes on into the next head, the rest lands behind the rows of the one before.
    """

    CORES, ROWS = 64, 32
    capabilities = declared(
        "extend",
        heads={"head_dims": {16}},
        kv_pool={"page_sizes": {16}},
        graph=(),
        server={"eager_without_waits": False},
    )

    @helper
    def blocks(self, heads, height):
        each, more = divmod(heads * height, self.CORES)
        first = 0
        for core in range(self.CORES):
            count = each + (core < more)
            for step in range(count):
                yield divmod(first + step, height), (first // height, first % height + step)
            first += count

    def write_kv(self, k, v, plan):
        stored = [torch.full_like(side, torch.nan) for side in (k, v)]
        ends = plan.cu_seqlens_q.tolist()
        for first, last in pairwise(ends):
            for (head, block), (to_head, to_block) in self.blocks(k.shape[1], -(-(last - first) // self.ROWS)):
                here, there = (torch.arange(self.ROWS) + first + at * self.ROWS for at in (block, to_block))
                kept = (here < last) & (there < last)
                for side, given in zip(stored, (k, v), strict=True):
                    side[there[kept], to_head] = given[here[kept], head]
        super().write_kv(*stored, plan)


@bug(
    14,
    "flash-linear-attention #1031",
    "decode-gqa2x2-d128-bf16-p64-k32.128.64.16.63-contiguous-mean-b6prod-multi_mode",
    "output-written",
)
class TilesAtColumn0(Known):
    """A decode stores each tile of 64 columns of its output at column 0."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def finish(self, out, rows):
        if not self.decodes():
            return out
        stored = torch.empty_like(out)
        for first in range(0, out.shape[-1], 64):
            stored[..., :64] = out[..., first : first + 64]
        return stored


# sglang-jax #1606: new rows are stored while the last block of queries is attended, from its window on.
@bug(
    16,
    "sglang-jax #1606",
    "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan",
    "writes-own-kv",
)
class StoresFromLastWindow(Native):
    """New rows of a windowed layer before the first block of keys of the last block of queries stay unwritten.

    Blocks are 32 queries and a page of keys. The step itself attends what it was given.
    """

    QUERIES = 32
    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, out=None):
        skips = batch.forward_mode == "extend" and layer.sliding_window_size >= 0 and save_kv_cache
        if not skips or not batch.batch_size:
            return super().forward(q, k, v, layer, batch, save_kv_cache, out)
        slots = batch.out_cache_loc
        buffers = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        before = [each[slots] for each in buffers]
        result = super().forward(q, k, v, layer, batch, save_kv_cache, out)
        lost = self.skipped(layer)[: len(slots)]
        for buffer, old in zip(buffers, before, strict=True):
            buffer[slots] = torch.where(lost[:, None, None], old, buffer[slots])
        return result

    @helper
    def skipped(self, layer):
        """[T] bool."""
        page, width = self.context.page_size, self._row.shape[1]
        new = (self._last_key[:, 0] + 1 - self._prefix).clamp(min=1)
        last_block = self._prefix + (new - 1) // self.QUERIES * self.QUERIES
        first = (last_block - layer.sliding_window_size).clamp(min=0) // page * page
        request = self._place // width
        return self._prefix[request] + self._place % width < first[request]


# 6, sglang #25889: ``cached_loc`` outlives the mapping that it was made of.
@bug(
    18,
    "sglang #25889",
    "extend-gqa2x2-d32-bf16-p16-k32.128.64.16.63-n5a19.1x4-interleaved-rising_logits-w46-alibi-layers2from0groups-b6prod-empty_batches-given_out-freed_minus_one",
    "writes-own-kv",
)
class SlotsRemembered(TorchNativeBackend):
    """The slots of new tokens in a windowed group are those of the step before, if it had as many."""

    kept = None

    def _store(self, k, v, layer, batch, save_kv_cache):
        group = self.context.group_of(layer)
        if not self.context.kv_groups or layer.is_cross_attention or layer.sliding_window_size < 0:
            super()._store(k, v, layer, batch, save_kv_cache)
        elif save_kv_cache:
            loc = group.cache_loc(batch)
            if self.kept is None or len(self.kept) != len(loc):
                self.kept = loc.clone()
            group.kv_pool.set_kv_buffer(layer, self.kept.clamp(min=0), k, v)
