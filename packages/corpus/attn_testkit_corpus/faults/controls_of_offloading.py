"""Healthy controls whose memory leaves to the host and comes back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from attn_testkit.contract import Offloads, Transfer

from .catalogue import control
from .with_offload import (
    LAYOUTS,
    OffloadFormats,
    OffloadGroups,
    OffloadIndices,
    OffloadParent,
    OffloadStates,
    Plane,
    load_slots,
    store_slots,
)


@control()
class PagesByLayer(OffloadParent):
    """Each forward waits for the pages of its layer, as in SGLang's HiCache (the parent of faults of keys and of
    streams)."""


@control()
class PagesOfGroups(OffloadGroups):
    """Each KV group has pages and host slots of its own (the parent of faults of groups)."""


@control()
class PagesWithScales(OffloadFormats):
    """Separate scales leave with their rows (the parent of faults of scales)."""


@control()
class PagesAndIndexKeys(OffloadIndices):
    """Index keys leave with the latent rows of their tokens (the parent of faults of index keys)."""


@control()
class StatesOnTheHost(OffloadStates):
    """Windows and states leave slot by slot (the parent of faults of states)."""


@control()
class CopiesThatTheHostWaitsFor(OffloadParent):
    """All copies are on the stream of the model, and the host waits for them, as in SGLang's ``get_cpu_copy``."""

    def on_stream(self, transfer: Transfer) -> AbstractContextManager[Any]:
        return nullcontext()

    def event_after(self, transfer: Transfer, event: torch.cuda.Event) -> torch.cuda.Event | None:
        torch.cuda.current_stream().synchronize()
        return None


@control()
class TheServerWaitsForAReload(OffloadParent):
    """A reload has one event for all layers, for which the server waits before it plans, as in vLLM's
    ``OffloadingConnector``."""

    capabilities = OffloadParent.capabilities.with_changes(offloads=Offloads(LAYOUTS))

    def layer_is_back(self, layer_id: int | None, transfer: Transfer) -> None:
        """Record nothing."""


@control()
class GatheredOnTheDevice(OffloadParent):
    """Rows are gathered in a buffer of the device and cross in one copy, slot by slot and without the rest of a last
    page, as by SGLang's transfer kernels."""

    def leave(self, plane: Plane) -> None:
        store_slots(plane)

    def bring_back(self, plane: Plane) -> None:
        load_slots(plane)
