"""Class J: state that several instances of a backend in one process share."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import BackendContext, ForwardBatch, ForwardMode
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_PLANNER_WORKSPACES: dict[torch.device, torch.Tensor] = {}


@fault(
    slug="planner-workspace-of-the-process",
    source="sglang #27193 (target and draft model)",
    modes=tuple(ForwardMode),
    executions=("graph",),
    checks=("buckets-independent",),
    hint="no other instance plans meanwhile",
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
