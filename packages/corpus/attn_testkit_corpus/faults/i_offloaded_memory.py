"""Class I: addresses of memory that leaves to the host and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attn_testkit.contract import BackendContext, KVGroup, Transfer

from .catalogue import fault
from .with_offload import OffloadFormats, OffloadGroups, OffloadIndices, OffloadParent, OffloadStates, Plane, bits

_CHECK = "reloaded-as-left"
_NOTHING = "nothing was stored there"
_ELSEWHERE = "to which nothing came back was written|nothing was stored|another token"


@fault("sglang #8915", _CHECK, "it holds [KV] of layer 0.*another layer: .* has its own strides of layers")
class OnlyTheFirstLayerComesBack(OffloadParent):
    """The kernel is not given the number of the layer, so every layer gets the rows of the first."""

    def planes(self, transfer: Transfer) -> list[Plane]:
        found = super().planes(transfer)
        self.first = {plane.number: plane for plane in reversed(found)}
        return found

    def source_of(self, plane: Plane) -> torch.Tensor:
        return self.first[plane.number].host


@fault(
    "LMCache #2374; sglang #30408", _CHECK, "of a host slot to which nothing left was written|the host does not have"
)
class HostIsTakenForLayerFirst(OffloadParent):
    """Strides of the host's pages are those of ``layer_first``, whatever the layout."""

    def host_of(self, plane: Plane) -> torch.Tensor:
        strides = torch.empty(plane.host.shape, device="meta").stride()
        if (
            plane.host.storage_offset() + plane.host.numel()
            > plane.host.untyped_storage().nbytes() // plane.host.itemsize
        ):
            return plane.host
        return plane.host.as_strided(plane.host.shape, strides)


@fault("ATOM #1807; sglang #36731", _CHECK, "another token: a page has|in no row|the host does not have")
class SlotsAreTakenForPages(OffloadParent):
    """Slots of the device are used as numbers of pages: of small numbers both exist."""

    def page_of(self, slot: int, plane: Plane) -> int:
        return slot % len(plane.device)


@fault("general; only full blocks are hashed", _CHECK, _NOTHING)
class LastPageStaysBehind(OffloadParent):
    """Only full pages leave, so the last tokens of a request are lost."""

    def rows_in(self, plane: Plane) -> int:
        return len(plane.moved.slots) // plane.page * plane.page


@fault("general; the same buffer is passed twice", _CHECK, "it holds K of layer .*K and not V")
class KeysLeaveAsValues(OffloadParent):
    """V of the host is a copy of K."""

    def planes(self, transfer: Transfer) -> list[Plane]:
        found = super().planes(transfer)
        self.keys_of = {plane.layer_id: plane.device for plane in found if plane.number == 0}
        return found

    def leave(self, plane: Plane) -> None:
        super().leave(replace(plane, device=self.keys_of[plane.layer_id]) if plane.number == 1 else plane)


@fault("sglang #31901", _CHECK, _ELSEWHERE)
class PagesOfTheHostAreThoseOfTheDevice(OffloadParent):
    """Rows come back to the device pages with the numbers of their host pages, as if both were allocated together."""

    def bring_back(self, plane: Plane) -> None:
        for _, theirs in self.page_pairs(plane):
            own = 1 + theirs % (len(plane.device) - 1)
            plane.device[own].copy_(self.source_of(plane)[theirs], non_blocking=True)


@fault(
    "general; pages that are mapped again",
    _CHECK,
    "to which nothing came back was written|nothing was stored|another token",
)
class ReloadedToTheOldSlots(OffloadParent):
    """Rows come back to the slots from which they left."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.old: dict[tuple[int, int, int], int] = {}

    def leave(self, plane: Plane) -> None:
        for ours, theirs in self.page_pairs(plane):
            self.old[plane.layer_id, plane.number, theirs] = ours
        super().leave(plane)

    def bring_back(self, plane: Plane) -> None:
        for ours, theirs in self.page_pairs(plane):
            own = self.old.get((plane.layer_id, plane.number, theirs), ours)
            plane.device[own].copy_(self.source_of(plane)[theirs], non_blocking=True)


@fault("general; a view is kept where a copy is meant", _CHECK, _NOTHING)
class HostIsAnAlias(OffloadParent):
    """The host keeps views of the device's pages, so they hold the rows of the next owner."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[tuple[int, int, int], torch.Tensor] = {}

    def leave(self, plane: Plane) -> None:
        for ours, theirs in self.page_pairs(plane):
            self.kept[plane.layer_id, plane.number, theirs] = plane.device[ours]

    def bring_back(self, plane: Plane) -> None:
        for ours, theirs in self.page_pairs(plane):
            plane.device[ours].copy_(self.kept[plane.layer_id, plane.number, theirs])


@fault("LMCache #2206; vLLM #48758", _CHECK, "another token: a page has")
class PartBeginsAtTheFirstPage(OffloadParent):
    """A reload of some of the pages reads the request's first pages on the host."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.first: dict[int, list[int]] = {}

    def offload(self, transfer: Transfer) -> torch.cuda.Event | None:
        page = self.context.page_size
        pages = [slot // page for slot in transfer.keys[0].host_slots[::page].tolist()]
        self.first.update(dict.fromkeys(pages, pages))
        return super().offload(transfer)

    def page_pairs(self, plane: Plane) -> Iterator[tuple[int, int]]:
        for number, (ours, theirs) in enumerate(super().page_pairs(plane)):
            yield ours, self.first[theirs][number] if theirs in self.first else theirs


@fault("ATOM #2146; sglang #35888", _CHECK, _NOTHING)
class ScalesStayBehind(OffloadFormats):
    """Rows leave without their scales, which are in memory of their own."""

    def planes(self, transfer: Transfer) -> list[Plane]:
        return [plane for plane in super().planes(transfer) if plane.number < 2]


@fault("vLLM #50443; sglang #26728", _CHECK, _NOTHING)
class OnlyTheFirstGroupLeaves(OffloadGroups):
    """Only the pages of the first KV group leave."""

    def groups(self) -> Iterator[tuple[int, KVGroup]]:
        yield 0, self.context.groups[0]


@fault("sglang #39156, #28895", _CHECK, _NOTHING)
class IndexKeysStayBehind(OffloadIndices):
    """Latent rows come back, and index keys do not: stale ones select other keys."""

    def every_plane(self, transfer: Transfer) -> Iterator[Plane]:
        pool = self.context.index_pool
        assert pool is not None
        own = {bits(pool.get_keys(each)).data_ptr() for each in pool.layer_ids}
        own |= {pool.get_scales(each).data_ptr() for each in pool.layer_ids}
        yield from (plane for plane in super().every_plane(transfer) if plane.device.data_ptr() not in own)


@fault("sglang #39862", _CHECK, _NOTHING, modelled="upstream it is the window of another convolution")
class WindowsStayBehind(OffloadStates):
    """States leave without the windows of the convolution."""

    def every_plane(self, transfer: Transfer) -> Iterator[Plane]:
        yield from (plane for plane in super().every_plane(transfer) if plane.number == 1)
