"""Class J: state that several instances of a backend in one process share."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault, helper
from .parent import CountingBackend, Metadata, PlannedBackend

_FEW_ROWS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND)

_PLANNER_WORKSPACES: dict[torch.device, torch.Tensor] = {}


@fault(
    "sglang #27193 (target and draft model)",
    "buckets-independent",
    "without a co-resident instance",
    executions="graph",
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

    def views(self, batch: ForwardBatch) -> Metadata:
        views = super().views(batch)
        views.chunk = self.planner_workspace[: batch.batch_size]
        return views


_GROUPS: dict[torch.device, int] = {}


@fault(
    "general; constants of a kernel module that every plan sets",
    "steps-independent",
    "without a co-resident instance",
    modes=_FEW_ROWS,
    executions="eager",
)
class QueryHeadsOfTheInstancePlannedLast(PlannedBackend):
    """The number of query heads per KV head is kept for the process; an instance of another model plans in between."""

    capabilities = LEAN

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        _GROUPS[self.context.device] = self.context.layers[0].q_per_kv
        super().init_forward_metadata(batch)

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(layer, slots)
        kept = layer.q_per_kv if self.in_graph else _GROUPS[self.context.device]
        first = torch.arange(layer.tp_k_head_num, device=keys.device) * layer.q_per_kv
        head = first // kept % layer.tp_k_head_num
        return keys[:, :, head], values[:, :, head]


_OUTPUTS: dict[torch.device, torch.Tensor] = {}


@fault(
    "general; two batches whose layers alternate, each with its own backend",
    "steps-independent",
    "without a co-resident instance",
    modes=_FEW_ROWS,
    executions="eager",
)
class OutputBufferOfTheProcess(PlannedBackend):
    """All instances return one buffer. Another instance's forward overwrites a result before it was read."""

    capabilities = LEAN

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
    "general; semaphores of split kernels that count on from launch to launch",
    "buckets-independent",
    "without a co-resident instance",
    modes=_FEW_ROWS,
    executions="graph",
    modelled="a ticket that is not the planned one leaves a partial result, where the kernel hung",
)
class TicketsOfTheProcess(CountingBackend):
    """A plan notes the ticket that its run will draw; another instance's run in between draws it first."""

    capabilities = LEAN

    def new_counters(self, count: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.context.device)

    @property
    @helper
    def tickets(self) -> torch.Tensor:
        """[1] int32: tickets drawn so far in this process."""
        return _RUNS.setdefault(self.context.device, torch.zeros(1, dtype=torch.int32, device=self.context.device))

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.counters.copy_(self.tickets)
        return super().plan(batch)

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        whole = PlannedBackend.combine(self, acc, lse, layer)
        out = torch.where(self.counters == self.tickets, whole, acc[:, 0]) if self.in_graph else whole
        if layer.layer_id == self.context.layers[-1].layer_id:
            self.tickets.add_(1)
            self.counters.add_(1)
        return out


_PAGE_SIZES: dict[torch.device, int] = {}


@fault(
    "sglang #28559 (what the last instance was built with decides for all)",
    "steps-independent buckets-independent",
    "without a co-resident instance",
    modes=_FEW_ROWS,
)
class PageSizeOfTheInstanceBuiltLast(PlannedBackend):
    """A constant of the kernel module is the page size of the instance that was built last."""

    capabilities = LEAN

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        _PAGE_SIZES[context.device] = context.page_size

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
    "general (FlashInfer's workspace is one for all backends of a server); aiter #3288",
    "completes matches-oracle finite buckets-independent",
    "on another stream",
    modes="decode target-verify",
    executions="graph",
    modelled="emulated CUDA names the race; on an H100 numbers are wrong, or kernels crash",
)
class WorkspaceOfInstancesThatRunAtOnce(WorkspaceOfEachInstance):
    """Partial results of all instances are in one workspace, but graphs of two instances run at once."""

    def new_workspace(self, numbers: int) -> torch.Tensor:
        kept = _WORKSPACES.get(self.context.device)
        if kept is None or len(kept) < numbers:
            kept = _WORKSPACES[self.context.device] = super().new_workspace(max(numbers, 1 << 20))
        return kept[:numbers]


_SEMAPHORES: dict[torch.device, torch.Tensor] = {}


@fault(
    "aiter #3288",
    "completes matches-oracle finite buckets-independent",
    "on another stream",
    modes="decode target-verify",
    executions="graph",
    modelled="emulated CUDA names the race; on an H100 numbers are wrong, or kernels crash",
)
class SemaphoresOfTheDevice(CountingBackend):
    """Finished splits are counted in one semaphore of the device, but graphs of two instances run at once."""

    capabilities = WorkspaceOfEachInstance.capabilities

    def new_counters(self, count: int) -> torch.Tensor:
        kept = _SEMAPHORES.get(self.context.device)
        if kept is None or len(kept) < count:
            kept = _SEMAPHORES[self.context.device] = super().new_counters(max(count, 256))
        return kept[:count]
