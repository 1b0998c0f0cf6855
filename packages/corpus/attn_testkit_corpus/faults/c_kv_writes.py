"""Class C: stores of K and V to a wrong or unowned slot, too many, or of other values than the model's."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import RegisterRowsBackend
from .catalogue import fault
from .dense import DenseBackend
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_DECODE = (ForwardMode.DECODE,)
_VERIFY = (ForwardMode.TARGET_VERIFY,)
_V1, _V2 = (ForwardMode.DRAFT_EXTEND,), (ForwardMode.DRAFT_EXTEND_V2,)
_EXTENDS = _VERIFY + _V1 + _V2
_GRAPH = ("graph",)


@fault(
    slug="pad-slot-minus-one-hits-last-slot",
    source="vLLM #43810, #43869",
    modes=_ALL,
    executions=_GRAPH,
    checks=("writes-own-kv",),
    hint="slot",
)
class PadSlotMinusOneHitsLastSlot(PlannedBackend):
    """Padding slots of -1 go into plain indexing, which counts them from the end of the pool."""

    @override
    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_in(name, target, source)
        if name == "slots":
            target[len(source) :] = -1


@fault(
    slug="padding-sink-slot-gets-nan",
    source="sglang #32477, #35351, #36003, #36207",
    modes=_ALL,
    checks=("reads-own-kv", "finite"),
    hint="of another owner|zeros instead of NaN|only the graph is wrong|value from capture time",
)
class PaddingSinkSlotGetsNan(PlannedBackend):
    """Page-table padding points at page 0, whose values are multiplied by a weight of 0 instead of masked."""

    @override
    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        self.pages_used = -(-super().plan_lengths(batch, counts) // self.context.page_size)
        return super().plan_lengths(batch, counts)

    @override
    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        return super().plan_pages(batch) * (self.index[: self.pages] < self.pages_used[:, None])

    @override
    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        sink = self.key_slots(meta) < self.context.page_size
        return torch.where(sink[:, :, None, None], values, super().mask_values(values, seen, meta))


@fault(
    slug="dummy-draft-steps-write-stale-blocks",
    source="vLLM #56734",
    modes=_DECODE,
    executions=_GRAPH,
    checks=("writes-own-kv",),
    hint="slot",
    modelled="padded rows of a decode represent the dummy draft steps of an idle rank",
)
class PaddingWritesThroughStaleRows(PlannedBackend):
    """Slots of padded rows are looked up through request rows of an earlier batch, whose blocks live on."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.rows = torch.zeros(max_bs, dtype=torch.int64, device=self.context.device)

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        live, bs = batch.out_cache_loc.shape[0], batch.batch_size
        self.rows[:live].copy_(batch.req_pool_indices[:live])
        views.slots[live:bs] = self.context.req_to_token[self.rows[live:bs], 0].long()


@fault(
    slug="verify-append-uses-capture-host-slots",
    source="TensorRT-LLM #17110",
    modes=_VERIFY,
    executions=_GRAPH,
    checks=("writes-own-kv", "replay-follows-batch"),
    hint="K and V|only the graph is wrong|value from capture time",
)
class VerifyAppendUsesCaptureHostSlots(PlannedBackend):
    """Write positions of drafts were computed by a host loop and frozen at capture: replays scatter to those."""

    @override
    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "slots" or self.capturing:
            super().copy_in(name, target, source)


@fault(
    slug="swa-write-locs-synthesised-zero",
    source="sglang #27091 (review)",
    modes=_V1 + _V2,
    checks=("writes-own-kv", "reads-own-kv"),
    hint="K and V|of another owner|slots",
)
class SwaWriteLocsSynthesisedZero(PlannedBackend):
    """The windowed layer's write locations are derived from zeros: everything goes to the dummy slot."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        if layer.sliding_window_size >= 0:
            meta = replace(meta, slots=torch.zeros_like(meta.slots))
        super().write_kv(layer, k, v, meta)


@fault(
    slug="alignment-rows-materialised-into-draft-kv",
    source="sglang 0.5.23 (dflash_worker_v2)",
    modes=_V1,
    executions=_GRAPH,
    checks=("writes-own-kv",),
    hint="K and V|slot",
    modelled="the graph's rejected rows stand for the rows that a server adds to round the batch up to its "
    "tensor-parallel size",
)
class AlignmentRowsMaterialised(PlannedBackend):
    """Rows after the live ones are stored too, in the live locations over again."""

    @override
    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name == "slots":
            source = source[self.index[: len(target)] % max(1, len(source))]
        super().copy_in(name, target, source)


@fault(
    slug="scatter-dest-includes-source-row",
    source="aiter #5034",
    modes=_EXTENDS,
    checks=("writes-own-kv", "reads-own-kv"),
    hint="K and V|slot|of another owner",
)
class ScatterDestIncludesSourceRow(PlannedBackend):
    """Rows are stored two per block, and the destination of the second adds its place in the block once more."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        moved = meta.slots + self.index[: len(meta.slots)] % 2
        super().write_kv(layer, k, v, replace(meta, slots=moved.clamp(max=self.context.kv_pool.num_slots - 1)))


@fault(
    slug="block-zeroing-spills-into-neighbour",
    source="vLLM #43990, #51718",
    modes=_ALL,
    checks=("writes-own-kv",),
    hint="slot",
)
class BlockZeroingSpillsIntoNeighbour(PlannedBackend):
    """A fresh page is zeroed from an offset into it, for a whole page: the next page loses its first rows."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        page, pool = self.context.page_size, self.context.kv_pool
        fresh = (meta.slots % page == 0)[:, None]
        block = meta.slots[:, None] + 1 + self.index[:page]
        block = torch.where(fresh & (block < pool.num_slots), block, 0).flatten()
        pool.get_key_buffer(layer.layer_id).view(torch.uint8).index_fill_(0, block, 0)
        super().write_kv(layer, k, v, meta)


@fault(
    slug="int8-scale-writes-overlap-kv",
    source="lmdeploy #4764",
    modes=_ALL,
    checks=("writes-own-kv", "matches-oracle"),
    hint="K and V|wrong softmax weights",
    modelled="an FP8 pool, and one byte a row",
)
class Int8ScaleWritesOverlapKv(PlannedBackend):
    """The offset of the quantisation scales lacks the base of their region: they are written over keys."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        if self.context.kv_pool.dtype.itemsize == 1:
            self.context.kv_pool.get_key_buffer(layer.layer_id).view(torch.uint8)[meta.slots, 0, 0] = 0x38


@fault(
    slug="warmup-leaves-nan-in-kv",
    source="rtp-llm afa6eb101",
    modes=_ALL,
    checks=("reads-own-kv", "finite"),
    hint="of another owner|zeros instead of NaN",
)
class WarmupLeavesNanInKv(PlannedBackend):
    """Masked lanes are multiplied by a weight of 0, which is right only in a pool that was cleared at start."""

    @override
    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        return values


@fault(
    slug="v-stored-with-the-scale-of-k",
    source="general",
    modes=_ALL,
    checks=("writes-own-kv", "matches-oracle"),
    hint="FP8 scales|K and V",
)
class VStoredWithScaleOfK(PlannedBackend):
    """An FP8 value row is stored with the key's scale."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(replace(layer, v_scale=layer.k_scale), k, v, meta)


@fault(
    slug="new-keys-attended-but-not-stored",
    source="vllm-plugin-FL #353",
    modes=_V1 + _V2,
    checks=("writes-own-kv", "reads-own-kv"),
    hint="K and V|slots",
    modelled="the row is stored, attended and taken back, so that only the memory shows it",
)
class NewKeysAttendedButNotStored(DenseBackend):
    """The last new row of a step is attended from registers, and its store is left to the caller."""

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        last = batch.out_cache_loc[-1:]
        self.context.kv_pool.get_value_buffer(layer.layer_id).view(torch.uint8).index_fill_(0, last, 0)
        return out


@fault(
    slug="captured-store-leaves-a-head-out",
    source="general",
    modes=_DECODE,
    executions=_GRAPH,
    checks=("writes-own-kv", "replay-follows-batch"),
    hint="K and V|only the graph is wrong|value from capture time",
)
class StoresOneHeadTooFew(PlannedBackend):
    """The captured store is launched for one KV head too few."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        pool, last = self.context.kv_pool, layer.tp_k_head_num - 1
        if not self.in_graph or last == 0:
            return super().write_kv(layer, k, v, meta)
        key = pool.get_key_buffer(layer.layer_id).view(torch.uint8)
        before = key[meta.slots, last]
        super().write_kv(layer, k, v, meta)
        key[meta.slots, last] = before
        return None


@fault(
    slug="save-kv-cache-ignored",
    source="vllm-ascend #11791; tpu-inference #2601",
    modes=_ALL,
    executions=("eager",),
    checks=("writes-own-kv",),
    hint="save_kv_cache=False",
)
class SaveKvCacheIgnored(PlannedBackend):
    """Rows are stored even if save_kv_cache is False, over those of a layer that shares its keys and values."""

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return super().forward(q, k, v, layer, batch, save_kv_cache=True)


@fault(
    slug="new-rows-always-from-registers",
    source="general; tpu-inference #2601",
    modes=_ALL,
    executions=("eager",),
    checks=("finite", "reads-own-kv", "matches-oracle"),
    hint="save_kv_cache=False",
)
class NewRowsAlwaysFromRegisters(RegisterRowsBackend):
    """The kernel attends to the new rows from k and v, even if save_kv_cache is False and only the pool has them."""

    capabilities = RegisterRowsBackend.capabilities.with_changes(kv_dtypes={"same"})

    @override
    def registers(self, k: torch.Tensor, v: torch.Tensor, store: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        return k, v


@fault(
    slug="padding-stored-behind-page-zero",
    source="general",
    modes=_ALL,
    executions=_GRAPH,
    checks=("writes-own-kv",),
    hint=r"offset 0\)",
    modelled="rows are stored again when attention is through, so that only the memory shows it",
)
class PaddingStoredBehindPageZero(PlannedBackend):
    """The sink of padded rows is taken for slot page_size, which is the first one behind page 0."""

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out, page, meta = super().forward(q, k, v, layer, batch, save_kv_cache), self.context.page_size, self.metadata
        assert meta is not None
        padded = meta.slots < page
        # Live rows are stored where they are already.
        self.write_kv(layer, k, v, replace(meta, slots=torch.where(padded, page, meta.slots)))
        return out
