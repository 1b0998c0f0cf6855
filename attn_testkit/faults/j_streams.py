"""Class J: work on a stream of the backend's own that nothing orders against the caller's."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import BackendContext, ForwardBatch, ForwardMode
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_RACE = "on emulated CUDA alone: on a GPU the numbers are wrong when the other stream is late, and seldom"


class PlansOnASideStream(PlannedBackend):
    """Plans on a stream of its own; both sides wait for each other."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.side = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """What is planned comes after what the caller did."""
        self.side.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """What the caller does next comes after the plan."""
        torch.cuda.current_stream().wait_stream(self.side)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.fork()
        with torch.cuda.stream(self.side):
            super().init_forward_metadata(batch)
        self.join()

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        self.fork()
        with torch.cuda.stream(self.side):
            super().fill(views, plan, batch)
        self.join()


@fault(
    slug="plan-on-a-stream-nobody-waits-for",
    source="sglang #28034",
    modes=_ALL,
    checks=("completes",),
    hint="wrote on another stream",
    modelled=_RACE,
)
class PlanOnAStreamNobodyWaitsFor(PlansOnASideStream):
    """The plan runs on a side stream, and the forward or the replay begins without waiting for it."""

    @override
    def join(self) -> None:
        pass


@fault(
    slug="plan-stream-waits-for-nothing",
    source="sglang #28034",
    modes=_ALL,
    executions=("graph",),
    checks=("completes",),
    hint="on another stream",
    modelled=_RACE,
)
class PlanStreamWaitsForNothing(PlansOnASideStream):
    """The plan's last kernels run on a side stream that does not wait for the first, nor for the replay before."""

    @override
    def fork(self) -> None:
        pass
