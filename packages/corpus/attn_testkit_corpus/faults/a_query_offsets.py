"""Class A, query offsets: where the rows of a request begin, at capture and at replay."""

from __future__ import annotations

import torch

from attn_testkit.contract import BackendContext, DraftExtendInput, ForwardBatch, ForwardMode

from .builds import FixedStrideBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_V1, _V2 = (ForwardMode.DRAFT_EXTEND,), (ForwardMode.DRAFT_EXTEND_V2,)


@fault("sglang #21987, #19807", "replay-follows-batch", "rows are packed", modes="draft-extend", executions="graph")
class QlensPackedVsUniformStride(FixedStrideBackend):
    """Replay packs query offsets by accepted counts; the captured kernel keeps the fixed stride of capture."""

    def stride(self, meta: Metadata) -> int:
        return meta.max_q_len


@fault("sglang #26019 (review)", "replay-follows-batch", "rows are packed", modes="draft-extend", executions="graph")
class DraftExtendQlensSeededOnce(PlannedBackend):
    """Query offsets are written once per bucket, at capture, and not refreshed from the accepted counts."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "cu_seqlens_q" or self.capturing:
            super().copy_in(name, target, source)


@fault(
    "sglang #27545",
    "replay-follows-batch",
    "only the graph is wrong|value from capture time",
    modes="draft-extend-v2",
    executions="graph",
)
class QoStrideStepsPlusOne(FixedStrideBackend):
    """The query stride is num_steps + 1 while the runner lays out num_draft_tokens rows per request."""

    def views(self, batch: ForwardBatch) -> Metadata:
        self.is_v2 = batch.forward_mode.is_draft_extend_v2()
        return super().views(batch)

    def stride(self, meta: Metadata) -> int:
        return self.context.speculative_num_steps + 1 if self.is_v2 else super().stride(meta)


@fault("sglang #31367", "replay-follows-batch", "num_tokens_per_req is", modes="draft-extend-v2", executions="graph")
class CaptureSpecWidthLeftAtMinusOne(PlannedBackend):
    """The captured rebuild of query offsets takes its stride from spec_info, which is not yet set at capture."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert self.metadata is not None
        assert isinstance(batch.spec_info, DraftExtendInput)
        offsets = self.index[: batch.batch_size + 1] * batch.spec_info.num_tokens_per_req
        self.metadata.cu_seqlens_q.copy_(offsets)


@fault("vLLM #53821", "replay-follows-batch", "only the graph is wrong|value from capture time", executions="graph")
class CaptureZeroesQueryStartLoc(PlannedBackend):
    """A shared builder zeroes the query offsets for capture, for an old kernel, and does not restore them."""

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "cu_seqlens_q":
            super().copy_in(name, target, source)


@fault(
    "TensorRT-LLM #17273 (review)",
    "replay-follows-batch",
    "rows are packed|only the graph is wrong|value from capture time",
    modes="draft-extend",
    executions="graph",
)
class HostCumsumInsideCapturedForward(PlannedBackend):
    """The captured forward sums query lengths on the host into pinned memory; a replay re-runs only the copy."""

    capabilities = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.pinned = torch.zeros(context.max_bs + 1, dtype=torch.int32, pin_memory=True)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        assert self.metadata is not None
        assert isinstance(batch.spec_info, DraftExtendInput)
        counts = batch.spec_info.num_accept_tokens_cpu
        assert counts is not None
        self.pinned[1 : len(counts) + 1] = torch.tensor(counts).cumsum(0)
        self.metadata.cu_seqlens_q.copy_(self.pinned[: len(counts) + 1], non_blocking=True)


@fault(
    "vLLM #27840; flash-attention #2520",
    "matches-oracle output-written replay-follows-batch",
    "offset of its query rows",
)
class OffsetsRestartAfterAWarp(PlannedBackend):
    """One warp sums query offsets, so offsets of requests from number 32 on begin again at 0."""

    def plan_offsets(self, counts: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        parts = [part.cumsum(0) for part in torch.split(counts, 32)]
        return torch.nn.functional.pad(torch.cat(parts), (1, 0)).to(torch.int32)


@fault("general", "matches-oracle replay-follows-batch", "128")
class PlanOfOneBlock(PlannedBackend):
    """One block of 128 threads plans the splits, without a loop: requests from number 128 on have no plan."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return torch.where(self.index[: len(lens)] < 128, super().plan_splits(lens), 0)
