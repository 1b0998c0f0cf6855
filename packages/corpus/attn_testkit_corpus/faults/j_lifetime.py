"""Class J: workspaces, counters and buffers: dirty, shared, replaced, freed, or of another owner."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, DraftExtendInput, ForwardBatch

from .catalogue import fault
from .dense import DenseBackend
from .parent import CountingBackend, Metadata, PlannedBackend


@fault(
    "flashinfer #1444, #1459, #1463, #1584",
    "repeatable matches-oracle finite",
    executions="eager",
    modelled="a count that never comes out leaves a partial result, where the kernel hung",
)
class CounterRegionNotZero(CountingBackend):
    """Counters that must be zero at first use are in memory that was never cleared."""

    def new_counters(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=self.context.device)


@fault(
    "sglang 0.5.23 (trtllm_mla_backend); flashinfer #3465",
    "buckets-independent",
    "alone",
    executions="graph",
    modelled="a count that never comes out leaves a partial result, where the kernel hung",
)
class TwoKernelsShareOneWorkspace(CountingBackend):
    """One mode's kernel keeps partial results where another mode's expects zeroed counters."""

    def new_workspace(self, numbers: int) -> torch.Tensor:
        return torch.zeros(numbers + self.context.max_bs, dtype=torch.float32, device=self.context.device)

    def counters_of(self, bs: int) -> torch.Tensor:
        return self.workspace[:bs].view(torch.int32)

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        # Only the decode kernel counts; the kernel of the others has a second launch to combine.
        kernel = CountingBackend if acc.shape[2] == 1 else PlannedBackend
        return kernel.combine(self, acc, lse, layer)

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self.workspace
        self.workspace = whole[self.context.max_bs :] if width == 1 else whole
        views = super().partial_views(bs, width, layer)
        self.workspace = whole
        return views


@fault(
    "flash-attention 1a58058a",
    "matches-oracle replay-follows-batch",
    "only layer 1",
    slug="semaphore-not-reset-when-metadata-reused",
)
class SemaphoreNotReset(CountingBackend):
    """Planning clears the semaphore; the second layer uses the same plan and finds it dirty."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.counters.zero_()
        return super().plan(batch)

    def reset(self, counters: torch.Tensor) -> None:
        """Do nothing: the next plan clears it."""


@fault(
    "flashinfer #3465; general (tickets of the last block)",
    "replay-follows-batch buckets-independent matches-oracle",
    "is not reset between replays",
    executions="graph",
    modelled="a count that never comes out leaves a partial result, where the kernel hung",
)
class CounterClearedInEagerOnly(CountingBackend):
    """Each layer has counters that an eager forward clears, and a captured one does not: warm-ups have used them up."""

    layer = 0

    def new_counters(self, count: int) -> torch.Tensor:
        return super().new_counters(count * len(self.context.layers))

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        self.layer = layer.layer_id - self.context.layers[0].layer_id
        return super().combine(acc, lse, layer)

    def counters_of(self, bs: int) -> torch.Tensor:
        begin = self.layer * self.context.max_bs
        return self.counters[begin : begin + bs]

    def reset(self, counters: torch.Tensor) -> None:
        if not self.in_graph:
            counters.zero_()


@fault(
    "vLLM #46067, #45670; TensorRT-LLM #16319",
    "addresses-stable",
    "allocate it once",
    modes="decode",
    executions="graph",
)
class WorkspaceGrowsAfterCapture(PlannedBackend):
    """Scratch memory grows on demand: a later capture or batch replaces what earlier graphs hold."""

    def new_workspace(self, numbers: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float32, device=self.context.device)

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        # An eager batch may use every multiprocessor, and so asks for one row of splits more than a graph does.
        need = (bs + (not self.in_graph)) * self.max_splits * width * layer.tp_q_head_num * (layer.v_head_dim + 1)
        if self.workspace.numel() < need:
            self.workspace = super().new_workspace(need)
        return super().partial_views(bs, width, layer)


@fault("TensorRT-LLM #16319; vLLM #48261", "addresses-stable", "allocate it once", executions="graph")
class WorkspaceReplacedAtEachCapture(PlannedBackend):
    """Each bucket's capture makes a new workspace, and frees the one that larger buckets recorded."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self.workspace = self.new_workspace(self.workspace.numel())
        super().init_forward_metadata_out_graph(batch, in_capture)


@fault(
    "aiter #5393, #4494, #4709",
    "captures-cleanly buckets-independent",
    "allocated while",
    executions="graph",
    slug="buffer-born-inside-capture",
    modelled="keyed by whether a capture is under way, since this kit warms up on the capture's stream",
)
class BufferAllocatedInCapture(CountingBackend):
    """Counters are cached by stream; the capture's stream is new, so they are allocated and cleared inside it."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.by_stream: dict[bool, torch.Tensor] = {}

    def counters_of(self, bs: int) -> torch.Tensor:
        stream = torch.cuda.is_current_stream_capturing()
        if stream not in self.by_stream:
            self.by_stream[stream] = self.new_counters(self.context.max_bs)
        return self.by_stream[stream][:bs]


@fault("general; sglang #33920", "addresses-stable buckets-independent", "allocate it once|alone", executions="graph")
class EagerStepReplacesGraphBuffers(PlannedBackend):
    """An eager step allocates the shared buffers for itself; replays fill the new ones, graphs read the old."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if self.graphs:
            self.init_cuda_graph_state(self.context.max_bs, self.context.max_num_tokens)
            for meta in self.graphs.values():
                bs, rows = len(meta.kv_lens), len(meta.slots)
                meta.page_table, meta.kv_lens = self.buffers.page_table[:bs], self.buffers.kv_lens[:bs]
                meta.cu_seqlens_q, meta.slots = self.buffers.cu_seqlens_q[: bs + 1], self.buffers.slots[:rows]
        super().init_forward_metadata(batch)


@fault("sglang #26019 (review); general", "addresses-stable", "allocate it once", executions="graph")
class PlanTensorsOfTheCaptureFreed(PlannedBackend):
    """The index that the captured kernel reads is a local of the planning call, freed when that returns."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert self.metadata is not None
        self.page_offset = torch.arange(self.context.page_size, device=self.context.device) if in_capture else None

    def key_slots(self, meta: Metadata) -> torch.Tensor:
        if not self.in_graph or self.page_offset is None:
            return super().key_slots(meta)
        return (meta.page_table.long()[:, :, None] * self.context.page_size + self.page_offset).flatten(1)


@fault("sglang #23037", "inputs-unchanged", "work on a copy")
class QueryScaledInPlace(DenseBackend):
    """The softmax scale is multiplied into q in place, and q is the caller's."""

    capabilities = DenseBackend.capabilities.with_changes(
        promises={"deterministic": False}, precision={"dtypes": {"bf16"}}
    )

    def queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        # By a power of two, so that the result is right to the last bit.
        rows = super().queries(q, layer)
        q.mul_(0.5)
        return rows


@fault("flash-attention #2670; general", "inputs-unchanged", "work on a copy", modes="decode")
class OutputWrittenOverTheQuery(PlannedBackend):
    """q and output have one shape, so the output is written into q to save a buffer."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return q.copy_(super().attend(q, layer, meta))


@fault("general", "inputs-unchanged", "work on a copy", modes="decode", slug="lengths-advanced-in-the-callers-tensor")
class LengthsAdvancedInPlace(PlannedBackend):
    """A decode advances seq_lens after its forward for the next step, in the caller's tensor."""

    def finish(self, batch: ForwardBatch) -> None:
        batch.seq_lens.add_(1)


@fault(
    "general; sglang #25002",
    "mode-outputs inputs-unchanged",
    "hidden_states|work on a copy",
    modes="draft-extend",
    executions="graph",
)
class AcceptCountsAdvancedInPlace(PlannedBackend):
    """The last layer turns accepted counts into row indices in place; the caller then prunes with them."""

    def finish(self, batch: ForwardBatch) -> None:
        if isinstance(batch.spec_info, DraftExtendInput):
            # As indices are: never below 0, however often a warm-up runs.
            batch.spec_info.num_accept_tokens.sub_(1).clamp_(min=0)


@fault("general; sglang #25002", "mode-outputs", "batch_size or num_accept_tokens", modes="draft-extend")
class AcceptCountsReplacedInTheCallersBatch(PlannedBackend):
    """Counts without the bonus token replace the accepted ones in spec_info, and the caller prunes with them."""

    def finish(self, batch: ForwardBatch) -> None:
        spec = batch.spec_info
        if isinstance(spec, DraftExtendInput):
            # Another tensor under the old name: the caller's own tensor is unchanged.
            spec.num_accept_tokens = spec.num_correct_drafts


@fault(
    "flashinfer #1116; aiter #2564; flash-attention #1957",
    "completes captures-cleanly replay-follows-batch",
    executions="graph",
    modelled="only in a graph: without one only the emulation shows it, since a race on a GPU may go well",
)
class KernelIgnoresCurrentStream(PlannedBackend):
    """The kernel is launched on the stream of the backend's construction, not on the one that captures."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.found = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        with torch.cuda.stream(self.found):
            return super().attend(q, layer, meta)


@fault(
    "general (counters that only the plan of an eager step clears)",
    "replay-follows-batch buckets-independent output-written",
    "and layers share it: .*self.counters",
    executions="graph",
)
class CountersLeftToTheNextLayer(CountingBackend):
    """The host clears the counters before each launch, which a graph does not record; all layers use them."""

    def counters_of(self, bs: int) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            self.counters.zero_()
        return super().counters_of(bs)

    def reset(self, counters: torch.Tensor) -> None:
        """Nothing."""
