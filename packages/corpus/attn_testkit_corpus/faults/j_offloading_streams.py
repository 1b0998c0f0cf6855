"""Class J: copies to the host and back that do not wait, or for which nothing waits."""

from __future__ import annotations

import torch

from attn_testkit.contract import Transfer

from .catalogue import fault
from .with_offload import OffloadParent, OffloadStates

_ORDER = "nothing orders the two"


@fault("vLLM #31341, #45704; ATOM #1807", "completes", _ORDER)
class StoresDoNotWaitForWork(OffloadParent):
    """Copies to the host begin before the forward has stored the rows."""

    def begin_store(self, transfer: Transfer) -> None:
        """Wait for nothing."""


@fault("vLLM #50696, #47282", "completes", _ORDER)
class LoadsDoNotWaitForWork(OffloadParent):
    """Copies to the device begin while earlier work uses the slots."""

    def begin_load(self, transfer: Transfer) -> None:
        """Wait for nothing."""


@fault(
    "sglang #38217",
    "completes",
    _ORDER,
    modelled="only emulated CUDA shows it: on an H200 rows of later layers come in time by chance",
)
class OnlyTheFirstLayerIsWaitedFor(OffloadParent):
    """The forward of the first layer waits for its rows, and other forwards do not."""

    def wait_for(self, layer_id: int) -> None:
        if layer_id == self.context.layers[0].layer_id:
            super().wait_for(layer_id)


@fault(
    "unified-cache-management #1130",
    "completes writes-own-kv replay-follows-batch",
    _ORDER,
    executions="graph",
    modelled="emulated CUDA says that nothing orders the two; on a GPU the numbers are wrong",
)
class ReplaysDoNotWait(OffloadParent):
    """Only forwards wait for rows that come back, and a replay runs no forward."""

    def wait_for_all(self) -> None:
        """Wait for nothing."""


@fault("LMCache #4955; sglang #31427", "completes", _ORDER)
class EventIsRecordedBeforeTheCopies(OffloadParent):
    """The event of a transfer is recorded before its copies, so the server uses their memory too early."""

    def event_of(self, transfer: Transfer) -> torch.cuda.Event:
        event = super().event_of(transfer)
        event.record(transfer.stream)
        return event

    def event_after(self, transfer: Transfer, event: torch.cuda.Event) -> torch.cuda.Event | None:
        return event


@fault("sglang #36743", "completes reloaded-as-left", modelled="here the server uses the state, and not a copy of it")
class StateIsUsedAfterItsFirstLayer(OffloadStates):
    """The event that is given to the server is that of the first layer, and a state has all layers."""

    first: torch.cuda.Event | None = None

    def layer_is_back(self, layer_id: int | None, transfer: Transfer) -> None:
        if self.first is None:
            self.first = transfer.stream.record_event()

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        self.first = None
        super().reload(transfer)
        return self.first
