"""Class J: state of earlier steps: plans under an incomplete key, tables sized once, entries of other requests."""

from __future__ import annotations

from collections import OrderedDict

import torch

from attn_testkit.contract import BackendContext, ForwardBatch, ForwardMode

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_EAGER, _GRAPH = ("eager",), ("graph",)
_HOST_LENGTHS = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})


def _lens_of(batch: ForwardBatch) -> tuple[int, ...]:
    """Host lengths of a batch."""
    assert batch.seq_lens_cpu is not None
    return tuple(int(length) for length in batch.seq_lens_cpu[: batch.batch_size])


@fault(
    "TensorRT-LLM #6163",
    "steps-independent",
    "state of an earlier step is kept",
    modes="target-verify",
    executions="eager",
)
class PlanCacheKeyWithoutMask(PlannedBackend):
    """Plans are kept by their lengths, but a plan also holds the tree mask, which is not in the key."""

    capabilities = _HOST_LENGTHS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.masks: dict[tuple[int, ...], torch.Tensor] = {}

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        key = _lens_of(batch)
        if self.in_graph or key not in self.masks:
            self.masks[key] = super().plan_mask(batch)
        return self.masks[key]


@fault("general; LightLLM #1367 (review)", "steps-independent", "state of an earlier step is kept", executions="eager")
class PageTableKeptWhileLengthsAgree(PlannedBackend):
    """The page table is uploaded only when a length changed, and other requests of the same lengths get it."""

    capabilities = _HOST_LENGTHS
    lens: tuple[int, ...] = ()

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        if self.in_graph or self.lens != _lens_of(batch):
            self.lens, self.table = _lens_of(batch), super().plan_pages(batch)
        return self.table


@fault(
    "vLLM #21525, #19825",
    "steps-independent",
    "state of an earlier step is kept",
    executions="eager",
    modelled="columns that do not fit read as page 0",
)
class PageTableSizedByFirstBatch(PlannedBackend):
    """The eager page table is made at the first step, as wide as its longest request needs, and kept."""

    capabilities = _HOST_LENGTHS
    columns = 0

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        table = super().plan_pages(batch)
        if self.in_graph:
            return table
        if not self.columns:
            self.columns = -(-(max(_lens_of(batch)) + self.width) // self.context.page_size)
        return table.masked_fill(self.index[: self.pages] >= self.columns, 0)


@fault(
    "kekzl/imp #538; general",
    "steps-independent",
    "state of an earlier step is kept",
    executions="eager",
    modelled="a shorter request is noticed as a new one",
)
class PageTableKeptByPoolRow(PlannedBackend):
    """A row's pages are appended to as its request grows, and the next request in the row inherits them."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        rows = len(context.req_to_token)
        self.table = torch.zeros(rows, self.pages, dtype=torch.int32, device=context.device)
        self.known = torch.zeros(rows, dtype=torch.int64, device=context.device)

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super().plan_lengths(batch, counts)
        self.used = -(-lens.long() // self.context.page_size)
        return lens

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        fresh, rows = super().plan_pages(batch), batch.req_pool_indices[: batch.batch_size].long()
        if self.in_graph:
            return fresh
        known = torch.where(self.used < self.known[rows], 0, self.known[rows])
        table = torch.where(self.index[: self.pages] < known[:, None], self.table[rows], fresh)
        self.table[rows], self.known[rows] = table, self.used
        return table


@fault(
    "LightLLM #1367",
    "buckets-independent",
    "the step is right as the only replay of the only bucket",
    executions="graph",
)
class ReplanSkippedForPermutedLengths(PlannedBackend):
    """Replanning is skipped while batch size, longest length and sum stay as they are, in any order."""

    capabilities = _HOST_LENGTHS

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.last: dict[tuple[ForwardMode, int], tuple[int, ...]] = {}

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        key, lens = self.key(batch), _lens_of(batch)
        proxy = (max(lens), sum(lens))
        self.skip = not self.capturing and self.last.get(key) == proxy
        self.last[key] = proxy
        super().fill(views, plan, batch)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "chunk" or not self.skip:
            super().copy_in(name, target, source)


@fault(
    "ROCm/aiter #4587",
    "addresses-stable buckets-independent",
    "allocate it once",
    executions="graph",
    modelled="the cache holds four tables, where upstream it held 128",
)
class SplitTableEvictedUnderAGraph(PlannedBackend):
    """A table that captured graphs read is owned only by a cache of bounded size, and later shapes evict it."""

    capabilities = _HOST_LENGTHS
    most = 4

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.tables: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.shape = (batch.batch_size, 0 if self.in_graph else sum(_lens_of(batch)))
        return super().plan(batch)

    def in_split(self, meta: Metadata) -> torch.Tensor:
        if self.shape not in self.tables:
            self.tables[self.shape] = self.index[: self.max_splits].clone()
        self.tables.move_to_end(self.shape)
        if len(self.tables) > self.most:
            self.tables.popitem(last=False)
        split = self.index[: self.pages * self.context.page_size] // meta.chunk.long()[:, None].clamp(min=1)
        return split[:, None] == self.tables[self.shape][:, None]


@fault("sglang #28767 (review)", "completes", "size of tensor", executions="graph")
class EagerBatchInGraphBuffers(PlannedBackend):
    """Eager steps share the graphs' buffers, and an eager batch may be larger than the largest graph."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        if self.graphs and self.metadata is not None:
            plan = self.metadata
            self.metadata = self.views(batch)
            self.metadata.slots = plan.slots
            for name in ("page_table", "kv_lens", "cu_seqlens_q", "chunk"):
                getattr(self.metadata, name).copy_(getattr(plan, name))
            self.metadata.mask = plan.mask
