"""Class C: stores of K and V to a wrong or unowned slot, too many stores, or wrong values."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import RegisterRowsBackend
from .catalogue import fault
from .dense import DenseBackend
from .parent import Metadata, PlannedBackend

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_V1, _V2 = (ForwardMode.DRAFT_EXTEND,), (ForwardMode.DRAFT_EXTEND_V2,)
_EXTENDS = _VERIFY + _V1 + _V2


@fault("vLLM #43810, #43869", "writes-own-kv", "slot", executions="graph")
class PadSlotMinusOneHitsLastSlot(PlannedBackend):
    """Padding slots of -1 are used as plain indices, which count from the end of the pool."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy_in(name, target, source)
        if name == "slots":
            target[len(source) :] = -1


@fault(
    "sglang #32477, #35351, #36003, #36207",
    "reads-own-kv finite",
    "of another owner|zeros instead of NaN|only the graph is wrong|value from capture time",
)
class PaddingSinkSlotGetsNan(PlannedBackend):
    """Page-table padding points at page 0, whose values are multiplied by a weight of 0 instead of masked."""

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        self.pages_used = -(-super().plan_lengths(batch, counts) // self.context.page_size)
        return super().plan_lengths(batch, counts)

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        return super().plan_pages(batch) * (self.index[: self.pages] < self.pages_used[:, None])

    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        sink = self.key_slots(meta) < self.context.page_size
        return torch.where(sink[:, :, None, None], values, super().mask_values(values, seen, meta))


@fault(
    "vLLM #56734",
    "writes-own-kv",
    "slot",
    modes="decode",
    executions="graph",
    slug="dummy-draft-steps-write-stale-blocks",
    modelled="padded rows of a decode represent the dummy draft steps of an idle rank",
)
class PaddingWritesThroughStaleRows(PlannedBackend):
    """Slots of padded rows are looked up through request rows of an earlier batch, whose blocks are still in use."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.rows = torch.zeros(max_bs, dtype=torch.int64, device=self.context.device)

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        live, bs = batch.out_cache_loc.shape[0], batch.batch_size
        self.rows[:live].copy_(batch.req_pool_indices[:live])
        views.slots[live:bs] = self.context.req_to_token[self.rows[live:bs], 0].long()


@fault(
    "TensorRT-LLM #17110",
    "writes-own-kv replay-follows-batch",
    "K and V|only the graph is wrong|value from capture time",
    modes="target-verify",
    executions="graph",
)
class VerifyAppendUsesCaptureHostSlots(PlannedBackend):
    """Write positions of drafts were computed by a host loop and frozen at capture: replays scatter to those."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "slots" or self.capturing:
            super().copy_in(name, target, source)


@fault(
    "sglang #27091 (review)",
    "writes-own-kv reads-own-kv",
    "K and V|of another owner|slots",
    modes="draft-extend draft-extend-v2",
)
class SwaWriteLocsSynthesisedZero(PlannedBackend):
    """The windowed layer's write locations are derived from zeros: everything goes to the dummy slot."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        if layer.sliding_window_size >= 0:
            meta = replace(meta, slots=torch.zeros_like(meta.slots))
        super().write_kv(layer, k, v, meta)


@fault(
    "sglang 0.5.23 (dflash_worker_v2)",
    "writes-own-kv",
    "K and V|slot",
    modes="draft-extend",
    executions="graph",
    slug="alignment-rows-materialised-into-draft-kv",
    modelled="the graph's rejected rows stand for the rows that a server adds to round the batch up to its "
    "tensor-parallel size",
)
class AlignmentRowsMaterialised(PlannedBackend):
    """Rows after the live ones are stored too, over the live locations."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name == "slots":
            source = source[self.index[: len(target)] % max(1, len(source))]
        super().copy_in(name, target, source)


@fault("aiter #5034", "writes-own-kv reads-own-kv", "K and V|slot|of another owner", modes=_EXTENDS)
class ScatterDestIncludesSourceRow(PlannedBackend):
    """Rows are stored two per block, and the destination of the second adds its position in the block twice."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        moved = meta.slots + self.index[: len(meta.slots)] % 2
        super().write_kv(layer, k, v, replace(meta, slots=moved.clamp(max=self.context.kv_pool.num_slots - 1)))


@fault("vLLM #43990, #51718", "writes-own-kv", "slot")
class BlockZeroingSpillsIntoNeighbour(PlannedBackend):
    """A fresh page is zeroed from an offset into it, for a whole page: the next page loses its first rows."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        page, pool = self.context.page_size, self.context.kv_pool
        fresh = (meta.slots % page == 0)[:, None]
        block = meta.slots[:, None] + 1 + self.index[:page]
        block = torch.where(fresh & (block < pool.num_slots), block, 0).flatten()
        pool.get_key_buffer(layer.layer_id).view(torch.uint8).index_fill_(0, block, 0)
        super().write_kv(layer, k, v, meta)


@fault(
    "lmdeploy #4764",
    "writes-own-kv matches-oracle",
    "K and V|wrong softmax weights",
    modelled="an FP8 pool, and one byte a row",
)
class Int8ScaleWritesOverlapKv(PlannedBackend):
    """The offset of the quantisation scales lacks the base of their region: they are written over keys."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(layer, k, v, meta)
        if self.context.kv_pool.dtype.itemsize == 1:
            self.context.kv_pool.get_key_buffer(layer.layer_id).view(torch.uint8)[meta.slots, 0, 0] = 0x38


@fault("rtp-llm afa6eb101", "reads-own-kv finite", "of another owner|zeros instead of NaN")
class WarmupLeavesNanInKv(PlannedBackend):
    """Masked lanes are multiplied by a weight of 0, which is right only in a pool that was cleared at start."""

    def mask_values(self, values: torch.Tensor, seen: torch.Tensor, meta: Metadata) -> torch.Tensor:
        return values


@fault("general", "writes-own-kv matches-oracle", "FP8 scales|K and V", slug="v-stored-with-the-scale-of-k")
class VStoredWithScaleOfK(PlannedBackend):
    """An FP8 value row is stored with the key's scale."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        super().write_kv(replace(layer, v_scale=layer.k_scale), k, v, meta)


@fault(
    "vllm-plugin-FL #353",
    "writes-own-kv reads-own-kv",
    "K and V|slots",
    modes="draft-extend draft-extend-v2",
    modelled="the row is stored, attended and taken back, so that only the memory shows it",
)
class NewKeysAttendedButNotStored(DenseBackend):
    """The last new row of a step is attended to from registers, and its store is left to the caller."""

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
    "general",
    "writes-own-kv replay-follows-batch",
    "K and V|only the graph is wrong|value from capture time",
    modes="decode",
    executions="graph",
    slug="captured-store-leaves-a-head-out",
)
class StoresOneHeadTooFew(PlannedBackend):
    """The captured store is launched for one KV head too few."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        pool, last = self.context.kv_pool, layer.tp_k_head_num - 1
        if not self.in_graph or last == 0:
            return super().write_kv(layer, k, v, meta)
        key = pool.get_key_buffer(layer.layer_id).view(torch.uint8)
        before = key[meta.slots, last]
        super().write_kv(layer, k, v, meta)
        key[meta.slots, last] = before
        return None


@fault("vllm-ascend #11791; tpu-inference #2601", "writes-own-kv", "save_kv_cache=False", executions="eager")
class SaveKvCacheIgnored(PlannedBackend):
    """Rows are stored even if save_kv_cache is False, over those of a layer that shares its keys and values."""

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


@fault("general; tpu-inference #2601", "finite reads-own-kv matches-oracle", "save_kv_cache=False", executions="eager")
class NewRowsAlwaysFromRegisters(RegisterRowsBackend):
    """The kernel attends to the new rows from k and v, even if save_kv_cache is False and only the pool has them."""

    capabilities = RegisterRowsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"same"}})

    def registers(self, k: torch.Tensor, v: torch.Tensor, store: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        return k, v


@fault(
    "general",
    "writes-own-kv",
    r"offset 0\)",
    executions="graph",
    modelled="rows are stored again when attention is through, so that only the memory shows it",
)
class PaddingStoredBehindPageZero(PlannedBackend):
    """Padded rows are stored in slot page_size, which is the first one after page 0."""

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
