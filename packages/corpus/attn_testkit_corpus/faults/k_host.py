"""Class K: the host side. Lengths that the host lacks, waits for, or reads from another step."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, DraftExtendInput, ForwardBatch, ForwardMode

from .catalogue import fault
from .dense import DenseBackend
from .parent import Metadata, PlannedBackend

_DECODE = (ForwardMode.DECODE,)
_V1, _V2 = (ForwardMode.DRAFT_EXTEND,), (ForwardMode.DRAFT_EXTEND_V2,)
_NEEDS_HOST = PlannedBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})


@fault(
    "sglang 0.5.23 (flashattention_backend; decode and draft-extend runners)",
    "replay-follows-batch buckets-independent",
    "only the graph is wrong|value from capture time|alone",
    modes="target-verify draft-extend draft-extend-v2",
    executions="graph",
    slug="stale-cpu-mirror-defeats-none-guard",
    modelled="the backend keeps the older lengths itself, where the runner's pinned buffer did",
)
class StaleCpuMirrorSizesPageTable(PlannedBackend):
    """The number of refreshed page-table columns follows from host lengths of an older batch; the rest stay stale."""

    capabilities = _NEEDS_HOST
    older_pages = 1

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        assert batch.seq_lens_cpu is not None
        longest = int(batch.seq_lens_cpu[: batch.batch_size].max()) + views.max_q_len
        self.older_pages = -(-longest // self.context.page_size)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name == "page_table" and not self.capturing:
            target, source = target[:, : self.older_pages], source[:, : self.older_pages]
        super().copy_in(name, target, source)


@fault(
    "sglang #27689, #26128, #28854",
    "no-host-lengths",
    "waits for the device",
    modes="target-verify draft-extend draft-extend-v2",
    executions="graph",
    slug="plan-blocks-on-d2h",
)
class PlanBlocksOnD2H(PlannedBackend):
    """The plan copies query offsets and lengths to the host, and waits for them, at every replay."""

    def plan(self, batch: ForwardBatch) -> Metadata:
        plan = super().plan(batch)
        self.offsets_on_host = plan.cu_seqlens_q.to("cpu")
        self.lens_on_host = plan.kv_lens.to("cpu")
        return plan


@fault("sglang #28765 (review)", "no-host-lengths", "waits for the device", executions="graph")
class LengthResyncReintroduced(PlannedBackend):
    """Lengths are fetched with tolist() at every step although the device could keep them."""

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        self.longest = max(batch.seq_lens[: batch.batch_size].tolist())
        return super().plan_lengths(batch, counts)


@fault(
    "vLLM #40654 (review)",
    "no-host-lengths",
    "waits for the device",
    modes="draft-extend draft-extend-v2",
    executions="graph",
    modelled="the backend makes the bound itself, because a batch here has exact lengths or none",
)
class UpperBoundTreatedAsExact(PlannedBackend):
    """The host has an upper bound of lengths, and fetches the rejected tokens from the device to make them exact."""

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        spec = batch.spec_info
        assert isinstance(spec, DraftExtendInput)
        rejected = self.max_q_len(batch.forward_mode) - spec.num_accept_tokens[: batch.batch_size]
        self.longest = self.context.max_context_len - int(rejected.min())
        return super().plan_lengths(batch, counts)


@fault("sglang #26824", "no-host-lengths", "waits for the device", executions="graph")
class PlanUploadsAHostList(PlannedBackend):
    """A Python list is made into a device tensor at every replay, from memory that is not pinned."""

    def plan_counts(self, batch: ForwardBatch) -> torch.Tensor:
        counts = super().plan_counts(batch)
        self.bounds = torch.tensor(list(range(batch.batch_size + 1)), device=self.context.device)
        return counts


@fault("sglang #26824; vLLM #40654 (review)", "no-host-lengths", "needs.cpu_seq_lens is False")
class ReadsMirrorsItDoesNotAskFor(PlannedBackend):
    """``Needs.cpu_seq_lens`` is False, and the plan reads seq_lens_cpu."""

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        self.longest = int(batch.seq_lens_cpu.max())  # type: ignore[union-attr]
        return super().plan_lengths(batch, counts)


@fault("sglang #25489", "captures-cleanly no-host-lengths", "cannot be captured", executions="graph")
class ItemInTheCapturedForward(PlannedBackend):
    """The forward reads the longest length on the host, to slice the keys."""

    # Half of the cases run an eager step before the capture, which waits first.

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        self.longest = int(meta.kv_lens.max().item())
        return super().visible(meta, layer, position)


@fault("general", "captures-cleanly no-host-lengths", "cannot be captured", modes="target-verify", executions="graph")
class DataDependentShapeInCapture(DenseBackend):
    """Rows are compacted with nonzero() inside the captured forward."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        seen = super().in_window(layer)
        self.pairs = seen.nonzero()
        return seen


@fault("general", "inputs-unchanged", "work on a copy", modes="target-verify", executions="eager")
class CpuLengthsAdvancedInPlace(PlannedBackend):
    """The plan adds the draft rows to the caller's host lengths."""

    capabilities = _NEEDS_HOST

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        assert batch.seq_lens_cpu is not None
        self.longest = int(batch.seq_lens_cpu.add_(self.width).max())
        return super().plan_lengths(batch, counts)


@fault("sglang #26019 (review)", "completes", "view without extend_", modes="draft-extend", executions="graph")
class ExtendFieldsReadAtReplay(PlannedBackend):
    """Draft-extend takes its row counts from extend_seq_lens, which a replay view does not have."""

    def plan_counts(self, batch: ForwardBatch) -> torch.Tensor:
        if self.in_graph and not self.capturing:
            assert batch.extend_seq_lens is not None
        return super().plan_counts(batch)
