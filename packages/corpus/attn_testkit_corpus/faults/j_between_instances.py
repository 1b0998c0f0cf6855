"""Class J: state that several instances of a backend in one process share."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import CountingBackend, Metadata, PlannedBackend

_FEW_ROWS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND)

_PLANNER_WORKSPACES: dict[torch.device, torch.Tensor] = {}


@fault(
    slug="planner-workspace-of-the-process",
    source="sglang #27193 (target and draft model)",
    modes=tuple(ForwardMode),
    executions=("graph",),
    checks=("buckets-independent",),
    hint="without a co-resident instance",
)
class PlannerWorkspaceOfTheProcess(PlannedBackend):
    """All instances plan into one workspace; the draft model's plan replaces the target's before it is run."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        kept = _PLANNER_WORKSPACES.get(context.device)
        if kept is None or len(kept) < context.max_bs:
            kept = torch.zeros(max(256, context.max_bs), dtype=torch.int32, device=context.device)
            _PLANNER_WORKSPACES[context.device] = kept
        self.planner_workspace = kept

    @override
    def views(self, batch: ForwardBatch) -> Metadata:
        views = super().views(batch)
        views.chunk = self.planner_workspace[: batch.batch_size]
        return views


_GROUPS: dict[torch.device, int] = {}


@fault(
    slug="query-heads-of-the-instance-planned-last",
    source="general; constants of a kernel module that every plan sets",
    modes=_FEW_ROWS,
    executions=("eager",),
    checks=("steps-independent",),
    hint="without a co-resident instance",
)
class QueryHeadsOfTheInstancePlannedLast(PlannedBackend):
    """The number of query heads per KV head is kept for the process; an instance of another model plans in between."""

    capabilities = LEAN

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        _GROUPS[self.context.device] = self.context.layers[0].q_per_kv
        super().init_forward_metadata(batch)

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(layer, slots)
        kept = layer.q_per_kv if self.in_graph else _GROUPS[self.context.device]
        first = torch.arange(layer.tp_k_head_num, device=keys.device) * layer.q_per_kv
        head = first // kept % layer.tp_k_head_num
        return keys[:, :, head], values[:, :, head]


_OUTPUTS: dict[torch.device, torch.Tensor] = {}


@fault(
    slug="output-buffer-of-the-process",
    source="general; two batches whose layers alternate, each with its own backend",
    modes=_FEW_ROWS,
    executions=("eager",),
    checks=("steps-independent",),
    hint="without a co-resident instance",
)
class OutputBufferOfTheProcess(PlannedBackend):
    """All instances return one buffer. Another instance's forward replaces a result that nobody has read yet."""

    capabilities = LEAN

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if self.in_graph:
            return out
        kept = _OUTPUTS.get(q.device)
        if kept is None or kept.numel() < out.numel():
            kept = _OUTPUTS[q.device] = torch.empty(out.numel(), dtype=out.dtype, device=q.device)
        return kept[: out.numel()].view(out.shape).copy_(out)


_RUNS: dict[torch.device, torch.Tensor] = {}


@fault(
    slug="tickets-of-the-process",
    source="general; semaphores of split kernels that count on from launch to launch",
    modes=_FEW_ROWS,
    executions=("graph",),
    checks=("buckets-independent",),
    hint="without a co-resident instance",
    modelled="a ticket that is not the planned one leaves a partial result, where the kernel hung",
)
class TicketsOfTheProcess(CountingBackend):
    """A plan notes the ticket that its run will draw; another instance's run in between draws it first."""

    capabilities = LEAN

    @override
    def new_counters(self, count: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.context.device)

    @property
    def tickets(self) -> torch.Tensor:
        """[1] int32: tickets drawn so far in this process."""
        return _RUNS.setdefault(self.context.device, torch.zeros(1, dtype=torch.int32, device=self.context.device))

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.counters.copy_(self.tickets)
        return super().plan(batch)

    @override
    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        whole = PlannedBackend.combine(self, acc, lse, layer)
        out = torch.where(self.counters == self.tickets, whole, acc[:, 0]) if self.in_graph else whole
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.tickets.add_(1)
            self.counters.add_(1)
        return out


_PAGE_SIZES: dict[torch.device, int] = {}


@fault(
    slug="page-size-of-the-instance-built-last",
    source="sglang #28559 (what the last instance was built with decides for all)",
    modes=_FEW_ROWS,
    checks=("steps-independent", "buckets-independent"),
    hint="without a co-resident instance",
)
class PageSizeOfTheInstanceBuiltLast(PlannedBackend):
    """A constant of the kernel module is the page size of the instance that was built last."""

    capabilities = LEAN

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        _PAGE_SIZES[context.device] = context.page_size

    @override
    def key_slots(self, meta: Metadata) -> torch.Tensor:
        page = self.context.page_size
        offset = self.index[:page] % _PAGE_SIZES[self.context.device]
        return (meta.page_table.long()[:, :, None] * page + offset).flatten(1)


class WorkspaceOfEachInstance(PlannedBackend):
    """Healthy parent: an instance has its own workspace for partial results, so two of them may run at once."""

    capabilities = LEAN.with_changes(
        eager={"decode"}, graph={"decode", "target-verify"}, server={"instances_run_at_once": True}
    )


_WORKSPACES: dict[torch.device, torch.Tensor] = {}


@fault(
    slug="workspace-of-instances-that-run-at-once",
    source="general (FlashInfer's workspace is one for all backends of a server); aiter #3288",
    modes=(ForwardMode.DECODE, ForwardMode.TARGET_VERIFY),
    executions=("graph",),
    checks=("completes", "matches-oracle", "finite", "buckets-independent"),
    hint="on another stream",
    modelled="emulated CUDA names the race; on an H100 numbers are wrong, or kernels crash",
)
class WorkspaceOfInstancesThatRunAtOnce(WorkspaceOfEachInstance):
    """Partial results of all instances lie in one workspace, and graphs of two instances run at once."""

    @override
    def new_workspace(self, numbers: int) -> torch.Tensor:
        kept = _WORKSPACES.get(self.context.device)
        if kept is None or len(kept) < numbers:
            kept = _WORKSPACES[self.context.device] = super().new_workspace(max(numbers, 1 << 20))
        return kept[:numbers]


_SEMAPHORES: dict[torch.device, torch.Tensor] = {}


@fault(
    slug="semaphores-of-the-device",
    source="aiter #3288",
    modes=(ForwardMode.DECODE, ForwardMode.TARGET_VERIFY),
    executions=("graph",),
    checks=("completes", "matches-oracle", "finite", "buckets-independent"),
    hint="on another stream",
    modelled="emulated CUDA names the race; on an H100 numbers are wrong, or kernels crash",
)
class SemaphoresOfTheDevice(CountingBackend):
    """Splits that are done are counted in one semaphore of the device, and graphs of two instances run at once."""

    capabilities = WorkspaceOfEachInstance.capabilities

    @override
    def new_counters(self, count: int) -> torch.Tensor:
        kept = _SEMAPHORES.get(self.context.device)
        if kept is None or len(kept) < count:
            kept = _SEMAPHORES[self.context.device] = super().new_counters(max(count, 256))
        return kept[:count]
