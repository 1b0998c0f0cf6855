"""Class A: metadata of capture and replay. Eager mode is right; under a graph some value of the capture stays in
use."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .builds import BatchInvariantBackend
from .catalogue import fault
from .parent import CountingBackend, Metadata, PlannedBackend

_V1, _V2 = (ForwardMode.DRAFT_EXTEND,), (ForwardMode.DRAFT_EXTEND_V2,)


@fault("sglang #26521", "finite", "metadata of the capture do not contain seq_lens", modes="decode", executions="graph")
class CaptureZeroLensNan(PlannedBackend):
    """Capture binds a zeroed length buffer and never copies seq_lens in: the warm-up divides 0 by 0."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "kv_lens" or not self.capturing:
            super().copy_in(name, target, source)

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        empty = (lse == -torch.inf).all(1)[..., None]
        return super().combine(acc, lse, layer).masked_fill(empty, torch.nan)


@fault(
    "sglang #26019 (review)",
    "addresses-stable replay-follows-batch",
    "fill it in place|allocate it once|captured",
    executions="graph",
)
class FreshTensorInsteadOfCopy(PlannedBackend):
    """Replay assigns new tensors to the metadata object instead of copying into the captured buffers."""

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        if self.capturing:
            super().fill(views, plan, batch)
        self.metadata = self.graphs[self.key(batch)] = views if self.capturing else plan


@fault(
    "vLLM #35175, #33638",
    "addresses-stable replay-follows-batch",
    "fill it in place|allocate it once",
    modes="decode",
    executions="graph",
)
class Fp8SchedMetaFreshTensors(PlannedBackend):
    """The split plan is a new tensor with an FP8 pool, and its graph buffer is not updated."""

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        if self.context.kv_pool.dtype.itemsize == 1:
            views.chunk = plan.chunk

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "chunk" or self.capturing or self.context.kv_pool.dtype.itemsize > 1:
            super().copy_in(name, target, source)


@fault(
    "vLLM #42444",
    "replay-follows-batch",
    "only the graph is wrong|value from capture time",
    modes="decode",
    executions="graph",
)
class PlanKernelNotRecorded(PlannedBackend):
    """The first forward makes the schedule, and it is a warm-up, so the planning kernel is not in the graph."""

    def in_split(self, meta: Metadata) -> torch.Tensor:
        if not hasattr(meta, "schedule"):
            meta.chunk = self.plan_splits(meta.kv_lens)
            meta.schedule = True  # type: ignore[attr-defined]
        return super().in_split(meta)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "chunk":
            super().copy_in(name, target, source)


@fault(
    "rtp-llm #378, #1084",
    "replay-follows-batch",
    "KV tokens are right, but requests of|KV tokens are missing",
    executions="graph",
)
class PlanNotRefreshedBeforeReplay(PlannedBackend):
    """Replay updates the page table in place but not the plan: chunk sizes stay those of capture."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "chunk" or self.capturing:
            super().copy_in(name, target, source)


@fault(
    "TensorRT-LLM #15556",
    "replay-follows-batch output-written",
    "only the graph is wrong|value from capture time",
    modes="decode",
    executions="graph",
    slug="replay-page-count-mismatch-hang",
    modelled="a request whose tiles never all come keeps its unfinished partial result, where the kernel hung",
)
class ReplayPageCountMismatch(CountingBackend):
    """The captured kernel waits for as many page tiles as there were at capture, but a replay has a different
    number."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if self.in_graph:
            assert self.metadata is not None
            tiles = (self.metadata.kv_lens - 1) // self.context.page_size
            self.counters_of(len(acc)).add_(tiles)
        return super().combine(acc, lse, layer)


@fault(
    "vLLM #20301, #25490",
    "replay-follows-batch",
    "KV tokens are right, but requests of|KV tokens are missing",
    executions="graph",
    modelled="splits past the accumulators are dropped, where the kernel wrote past them",
)
class SplitCountGrowsPastCapture(PlannedBackend):
    """Accumulators are sized for the number of splits at capture, and replay chooses more splits."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        sized = 1 if self.in_graph else self.max_splits
        return super().combine(acc[:, :sized], lse[:, :sized], layer)


@fault(
    "vLLM #41834 (comment)",
    "replay-follows-batch",
    "request 0 is right and all others are wrong|only the graph is wrong|value from capture time",
    executions="graph",
)
class RowStrideFromLiveBatchMax(PlannedBackend):
    """Rows of a flat page list are laid out by the longest live request; the captured kernel has full width."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        pages = (lens.amax() + self.context.page_size - 1) // self.context.page_size
        self.row_width = torch.exp2(pages.clamp(1, self.pages).float().log2().ceil()).long().clamp(max=self.pages)
        return super().plan_splits(lens)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "page_table":
            return super().copy_in(name, target, source)
        column, row = self.index[: self.pages], self.index[: len(source), None]
        at = torch.where(column < self.row_width, row * self.row_width + column, source.numel())
        flat = torch.cat([target.flatten(), target.new_zeros(1)])
        flat.scatter_(0, at.flatten(), source.flatten())
        target.copy_(flat[:-1].view_as(target))
        return None


@fault(
    "sglang #26019 (review)",
    "completes",
    "planned",
    modes="extend",
    executions="graph",
    slug="extend-branch-missing-in-graph-path",
)
class BranchMissingInGraphPath(PlannedBackend):
    """The branch of extend was not ported when capture and replay were merged: it has no metadata."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.metadata = None
        if batch.forward_mode is not ForwardMode.EXTEND:
            super().init_forward_metadata_out_graph(batch, in_capture)


@fault(
    "lmdeploy #4661; vLLM #48261",
    "completes buckets-independent",
    executions="graph",
    modelled="the key is the backend's, where upstream it was the runner's",
)
class GraphKeyMissingQueryLen(PlannedBackend):
    """Metadata of graphs are kept only by batch size: another mode of that size is captured with its views."""

    def views(self, batch: ForwardBatch) -> Metadata:
        known = [meta for (_, bs), meta in self.graphs.items() if bs == batch.batch_size]
        return known[0] if known else super().views(batch)


@fault(
    "general (graphs of two modes under one key)",
    "addresses-stable",
    "graphs of two modes share it",
    executions="graph",
)
class MetadataOfTheModeCapturedLast(PlannedBackend):
    """Metadata are allocated for each capture and kept by batch size: those of one mode replace those of another."""

    def key(self, batch: ForwardBatch) -> tuple[ForwardMode, int]:
        return ForwardMode.DECODE, batch.batch_size

    def views(self, batch: ForwardBatch) -> Metadata:
        whole = super().views(batch)
        return replace(
            whole,
            page_table=whole.page_table.clone(),
            kv_lens=whole.kv_lens.clone(),
            cu_seqlens_q=whole.cu_seqlens_q.clone(),
            chunk=whole.chunk.clone(),
            slots=whole.slots.clone(),
        )


@fault("lmdeploy #3372, #4005", "replay-follows-batch writes-own-kv padding-inert", executions="graph")
class ReplayBucketRecomputed(PlannedBackend):
    """Replay fills as many rows as the next power of two above the live batch, not as many as the bucket has."""

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        live = -(-batch.out_cache_loc.shape[0] // views.max_q_len)
        self.filled = min(batch.batch_size, 1 << (live - 1).bit_length())
        self.filled_rows = self.filled * views.max_q_len
        super().fill(views, plan, batch)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        count = self.filled_rows if name == "slots" else self.filled + (name == "cu_seqlens_q")
        super().copy_in(name, target[:count], source[:count])


@fault(
    "sglang 0.5.23 (frozen_kv_mtp_cuda_graph_runner)",
    "replay-follows-batch reads-own-kv",
    "only the graph is wrong|value from capture time",
    modes="decode",
    executions="graph",
)
class FrozenKvStepOffsetBaked(PlannedBackend):
    """The recorded rebuild adds a draft step to the lengths, so every replay reads one slot that was never written."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert self.metadata is not None
        self.metadata.kv_lens += 1


@fault(
    "flashinfer #639, #641",
    "replay-follows-batch",
    "KV tokens are right, but requests of|KV tokens are missing",
    executions="graph",
    modelled="the grid runs over keys, where upstream it ran over query rows",
)
class GridCoversTheCaptureLengths(PlannedBackend):
    """The launch grid follows the longest request, as a Python number: a graph covers the capture's lengths."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def plan(self, batch: ForwardBatch) -> Metadata:
        assert batch.seq_lens_cpu is not None
        self.longest = int(batch.seq_lens_cpu[: batch.batch_size].max()) + self.width
        return super().plan(batch)

    def in_split(self, meta: Metadata) -> torch.Tensor:
        keys = super().in_split(meta)
        return keys & (self.index[: keys.shape[-1]] < -(-self.longest // self.tile) * self.tile)


@fault(
    "sglang #29858, #22679",
    "replay-follows-batch matches-oracle",
    "before the window|only the graph is wrong|value from capture time",
    modes="draft-extend draft-extend-v2",
    executions="graph",
    modelled="with one pool for all layers the missing indices show as a missing window",
)
class SwaDraftExtendHasNoWindowBuffers(PlannedBackend):
    """Three of four graph paths build the windowed layer's indices; draft-extend leaves them at None."""

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return torch.zeros_like(position) if self.in_graph else super().window_start(position, layer)


@fault(
    "general",
    "replay-follows-batch",
    "tree mask|only the graph is wrong|value from capture time",
    modes="target-verify",
    executions="graph",
)
class TreeMaskOfTheCapture(PlannedBackend):
    """Lengths and pages are refreshed at replay, but the mask buffer is not."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "mask" or self.capturing:
            super().copy_in(name, target, source)


@fault("general", "replay-follows-batch", "only the graph is wrong|value from capture time", executions="graph")
class PageTableRefreshedForTheFirstPagesOnly(PlannedBackend):
    """A replay copies as many page-table columns as the capture batch used."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name == "page_table" and not self.capturing:
            target[:, :1].copy_(source[:, :1])
        else:
            super().copy_in(name, target, source)


@fault(
    "sglang #26019 (review), MUTATION_FIXES.md M23",
    "graph-matches-eager",
    "split count",
    modes="decode",
    executions="graph",
)
class KvSplitsNotRefreshed(BatchInvariantBackend):
    """Replay keeps the number of splits of the capture: results are right, but their bits differ from eager mode."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return lens.clamp(min=1) if self.in_graph else super().plan_splits(lens)
