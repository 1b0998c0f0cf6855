"""Class J: workspaces, counters and buffers: dirty, shared, replaced, freed, or somebody else's."""

from __future__ import annotations

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import AttentionLayer, BackendContext, DraftExtendInput, ForwardBatch, ForwardMode
from .catalogue import fault
from .parent import CountingBackend, Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_DECODE = (ForwardMode.DECODE,)
_GRAPH = ("graph",)


@fault(
    slug="counter-region-not-zero",
    bug_class="J",
    source="flashinfer #1444, #1459, #1463, #1584",
    modes=_ALL,
    executions=("eager",),
    mechanism="counters that must be zero at first use lie in memory that nobody cleared",
    promises=("repeatable", "matches-oracle", "finite"),
    modelled="a count that never comes out leaves a partial result, where the kernel hung",
)
class CounterRegionNotZero(CountingBackend):
    def new_counters(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=self.context.device)


@fault(
    slug="two-kernels-share-one-workspace",
    bug_class="J",
    source="sglang 0.5.23 (trtllm_mla_backend); flashinfer #3465",
    modes=_ALL,
    executions=_GRAPH,
    mechanism="one mode's kernel keeps partial results where another mode's expects zeroed counters",
    promises=("buckets-independent",),
    hint="alone",
    modelled="a count that never comes out leaves a partial result, where the kernel hung",
)
class TwoKernelsShareOneWorkspace(CountingBackend):
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
    slug="semaphore-not-reset-when-metadata-reused",
    bug_class="J",
    source="flash-attention 1a58058a",
    modes=_ALL,
    mechanism="planning clears the semaphore; the second layer uses the same plan and finds it dirty",
    promises=("matches-oracle", "replay-follows-batch"),
    hint="only layer 1",
)
class SemaphoreNotReset(CountingBackend):
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.counters.zero_()
        return super().plan(batch)

    def reset(self, counters: torch.Tensor) -> None:
        """Left to the next plan."""


@fault(
    slug="workspace-grows-after-capture",
    bug_class="J",
    source="vLLM #46067, #45670; TensorRT-LLM #16319",
    modes=_DECODE,
    executions=_GRAPH,
    mechanism="scratch memory grows on demand: a later capture or batch replaces what earlier graphs hold",
    promises=("addresses-stable",),
    hint="allocate it once",
)
class WorkspaceGrowsAfterCapture(PlannedBackend):
    def new_workspace(self, numbers: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float32, device=self.context.device)

    def partial_views(self, bs: int, width: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        # An eager batch may use every multiprocessor, and so asks for one row of splits more than a graph does.
        need = (bs + (not self.in_graph)) * self.max_splits * width * layer.tp_q_head_num * (layer.v_head_dim + 1)
        if self.workspace.numel() < need:
            self.workspace = super().new_workspace(need)
        return super().partial_views(bs, width, layer)


@fault(
    slug="workspace-replaced-at-each-capture",
    bug_class="J",
    source="TensorRT-LLM #16319; vLLM #48261",
    modes=_ALL,
    executions=_GRAPH,
    mechanism="each bucket's capture makes the workspace anew, and frees the one that larger buckets recorded",
    promises=("addresses-stable",),
    hint="allocate it once",
)
class WorkspaceReplacedAtEachCapture(PlannedBackend):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self.workspace = self.new_workspace(self.workspace.numel())
        super().init_forward_metadata_out_graph(batch, in_capture)


@fault(
    slug="buffer-born-inside-capture",
    bug_class="J",
    source="aiter #5393, #4494, #4709",
    modes=_ALL,
    executions=_GRAPH,
    mechanism="counters are cached by stream; the capture's stream is new, so they are allocated and cleared inside it",
    promises=("captures-cleanly", "buckets-independent"),
    hint="allocated while",
    modelled="keyed by whether a capture is under way, since this kit warms up on the capture's stream",
)
class BufferBornInsideCapture(CountingBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.by_stream: dict[bool, torch.Tensor] = {}

    def counters_of(self, bs: int) -> torch.Tensor:
        stream = torch.cuda.is_current_stream_capturing()
        if stream not in self.by_stream:
            self.by_stream[stream] = self.new_counters(self.context.max_bs)
        return self.by_stream[stream][:bs]


@fault(
    slug="eager-step-replaces-graph-buffers",
    bug_class="J",
    source="general; sglang #33920",
    modes=_ALL,
    executions=_GRAPH,
    mechanism="an eager step allocates the shared buffers for itself; replays fill the new ones, graphs read the old",
    promises=("addresses-stable", "buckets-independent"),
    hint="allocate it once|alone",
)
class EagerStepReplacesGraphBuffers(PlannedBackend):
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if self.graphs:
            self.init_cuda_graph_state(self.context.max_bs, self.context.max_num_tokens)
            for meta in self.graphs.values():
                bs, rows = len(meta.kv_lens), len(meta.slots)
                meta.page_table, meta.kv_lens = self.buffers.page_table[:bs], self.buffers.kv_lens[:bs]
                meta.cu_seqlens_q, meta.slots = self.buffers.cu_seqlens_q[: bs + 1], self.buffers.slots[:rows]
        super().init_forward_metadata(batch)


@fault(
    slug="plan-tensors-of-the-capture-freed",
    bug_class="J",
    source="sglang #26019 (review); general",
    modes=_ALL,
    executions=_GRAPH,
    mechanism="the index that the captured kernel reads is a local of the planning call, gone when that returns",
    promises=("addresses-stable",),
    hint="allocate it once",
)
class PlanTensorsOfTheCaptureFreed(PlannedBackend):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert self.metadata is not None
        self.page_offset = torch.arange(self.context.page_size, device=self.context.device) if in_capture else None

    def key_slots(self, meta: Metadata) -> torch.Tensor:
        if not self.in_graph or self.page_offset is None:
            return super().key_slots(meta)
        return (meta.page_table.long()[:, :, None] * self.context.page_size + self.page_offset).flatten(1)


@fault(
    slug="query-scaled-in-place",
    bug_class="J",
    source="sglang #23037",
    modes=_ALL,
    mechanism="the softmax scale is multiplied into q where it lies, and q is the caller's",
    promises=("inputs-unchanged",),
    hint="work on a copy",
)
class QueryScaledInPlace(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(deterministic=False, dtypes={"bf16"})

    def _queries(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        # By a power of two, so that the result is right to the last bit.
        rows = super()._queries(q, layer)
        q.mul_(0.5)
        return rows


@fault(
    slug="output-written-over-the-query",
    bug_class="J",
    source="flash-attention #2670; general",
    modes=_DECODE,
    mechanism="q and output have one shape, so the output is written into q to save a buffer",
    promises=("inputs-unchanged",),
    hint="work on a copy",
)
class OutputWrittenOverTheQuery(PlannedBackend):
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        return q.copy_(super().attend(q, layer, meta))


class _ActsAfterTheLastLayer(PlannedBackend):
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
        if layer.layer_id == len(self.context.layers) - 1:
            self.finish(batch)
        return out

    def finish(self, batch: ForwardBatch) -> None:
        """What is done to the caller's batch when its last layer is through."""


@fault(
    slug="lengths-advanced-in-the-callers-tensor",
    bug_class="J",
    source="general",
    modes=_DECODE,
    mechanism="after its forward a decode advances seq_lens for the next step, in the caller's tensor",
    promises=("inputs-unchanged",),
    hint="work on a copy",
)
class LengthsAdvancedInPlace(_ActsAfterTheLastLayer):
    def finish(self, batch: ForwardBatch) -> None:
        batch.seq_lens.add_(1)


@fault(
    slug="accept-counts-advanced-in-place",
    bug_class="J",
    source="general; sglang #25002",
    modes=(ForwardMode.DRAFT_EXTEND,),
    executions=_GRAPH,
    mechanism="the last layer turns accepted counts into row indices where they lie; the caller then prunes with them",
    promises=("mode-outputs", "inputs-unchanged"),
    hint="hidden_states|work on a copy",
)
class AcceptCountsAdvancedInPlace(_ActsAfterTheLastLayer):
    def finish(self, batch: ForwardBatch) -> None:
        if isinstance(batch.spec_info, DraftExtendInput):
            # As indices are: never below 0, however often a warm-up runs.
            batch.spec_info.num_accept_tokens.sub_(1).clamp_(min=0)


@fault(
    slug="accept-counts-replaced-in-the-callers-batch",
    bug_class="J",
    source="general; sglang #25002",
    modes=(ForwardMode.DRAFT_EXTEND,),
    executions=("eager", "graph"),
    mechanism="counts without the bonus token replace the accepted ones in spec_info, and the caller prunes with them",
    promises=("mode-outputs",),
    hint="batch_size or num_accept_tokens",
)
class AcceptCountsReplacedInTheCallersBatch(_ActsAfterTheLastLayer):
    def finish(self, batch: ForwardBatch) -> None:
        spec = batch.spec_info
        if isinstance(spec, DraftExtendInput):
            # Another tensor under the old name: what the caller lent is unchanged.
            spec.num_accept_tokens = spec.num_correct_drafts
