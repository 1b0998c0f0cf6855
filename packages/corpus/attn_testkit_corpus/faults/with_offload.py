"""Healthy parents whose memory leaves to the host and comes back, page by page on a stream and layer by layer.

Every quantity is one small method, so that a bug is one override. They share no code with the copies of the adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    KVGroup,
    Moved,
    Offloads,
    State,
    Transfer,
)

from .dense import DenseBackend
from .grouped import GroupedBackend
from .indexer import IndexerParent
from .row_formats import RowFormatsBackend
from .states import StateParent

LAYOUTS = frozenset({"layer_first", "page_first", "page_first_direct"})


@dataclass(frozen=True)
class Plane:
    """Rows of one kind in one layer: on the device and on the host, [pages, page_size, *row] each."""

    layer_id: int
    number: int
    """0: K, a latent row, index keys or a window. 1: V, index scales or a state. From 2 on: scales of rows."""
    device: torch.Tensor
    host: torch.Tensor
    moved: Moved

    @property
    def page(self) -> int:
        """Slots of a page of the device."""
        return self.device.shape[1]


class Copies:
    """The copies, on the server's stream."""

    context: BackendContext

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)  # type: ignore[call-arg]
        self.events: dict[int, list[torch.cuda.Event]] = {}
        """Events after the copies of each layer to the device, for which no forward has waited."""

    def offload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Copy all planes to the host."""
        self.begin_store(transfer)
        event = self.event_of(transfer)
        with self.on_stream(transfer):
            for plane in self.planes(transfer):
                self.leave(plane)
        return self.event_after(transfer, event)

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Copy all planes to the device, and record an event after each layer."""
        self.begin_load(transfer)
        event = self.event_of(transfer)
        last: int | None = None
        for plane in self.planes(transfer):
            if last not in (None, plane.layer_id):
                self.layer_is_back(last, transfer)
            last = plane.layer_id
            with self.on_stream(transfer):
                self.bring_back(plane)
        self.layer_is_back(last, transfer)
        return self.event_after(transfer, event)

    def begin_store(self, transfer: Transfer) -> None:
        """Order the copies after the work that stores rows."""
        transfer.stream.wait_stream(torch.cuda.current_stream())

    def begin_load(self, transfer: Transfer) -> None:
        """Order the copies after the work that uses the slots."""
        transfer.stream.wait_stream(torch.cuda.current_stream())

    def on_stream(self, transfer: Transfer) -> AbstractContextManager[Any]:
        """A context in which work is on the stream of the copies."""
        return torch.cuda.stream(transfer.stream)

    def event_of(self, transfer: Transfer) -> torch.cuda.Event:
        """An event for a transfer, before its copies."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    def event_after(self, transfer: Transfer, event: torch.cuda.Event) -> torch.cuda.Event | None:
        """The event after the copies of a transfer."""
        event.record(transfer.stream)
        return event

    def layer_is_back(self, layer_id: int | None, transfer: Transfer) -> None:
        """Record an event after the copies of a layer."""
        if layer_id is not None:
            self.events.setdefault(layer_id, []).append(transfer.stream.record_event())

    def wait_for(self, layer_id: int) -> None:
        """Let the current stream wait for the rows of a layer."""
        for event in self.events.pop(layer_id, ()):
            torch.cuda.current_stream().wait_event(event)

    def wait_for_all(self) -> None:
        """Let the current stream wait for the rows of all layers."""
        for layer_id in list(self.events):
            self.wait_for(layer_id)

    def planes(self, transfer: Transfer) -> list[Plane]:
        """All planes, layer by layer."""
        return sorted(self.every_plane(transfer), key=lambda plane: plane.layer_id)

    def every_plane(self, transfer: Transfer) -> Iterator[Plane]:
        """All planes, in any order of layers."""
        for number, group in self.groups():
            for layer in group.kv_pool.layers:
                if layer.kv_sharing_target_layer_id < 0:
                    views = self.rows_of_layer(group, layer)
                    host = transfer.host.keys[number].parts[layer.layer_id]
                    for kind, (device, rows) in enumerate(zip(views, host, strict=True)):
                        yield Plane(layer.layer_id, kind, bits(device), bits(rows), transfer.keys[number])

    def groups(self) -> Iterator[tuple[int, KVGroup]]:
        """KV groups that leave, with their numbers."""
        yield from enumerate(self.context.groups)

    def rows_of_layer(self, group: KVGroup, layer: AttentionLayer) -> tuple[torch.Tensor, ...]:
        """[pages, page_size, Hk, numbers] of K and V, and of separate scales."""
        pages = group.kv_pool.get_kv_pages(layer.layer_id)[: layer.head_layout.pool_rows]
        return pages + group.kv_pool.get_scale_pages(layer.layer_id)

    def leave(self, plane: Plane) -> None:
        """Copy pages to the host."""
        for ours, theirs in self.page_pairs(plane):
            self.host_of(plane)[theirs].copy_(plane.device[ours], non_blocking=True)

    def bring_back(self, plane: Plane) -> None:
        """Copy pages to the device."""
        for ours, theirs in self.page_pairs(plane):
            plane.device[ours].copy_(self.source_of(plane)[theirs], non_blocking=True)

    def host_of(self, plane: Plane) -> torch.Tensor:
        """Host memory to which a plane leaves."""
        return plane.host

    def source_of(self, plane: Plane) -> torch.Tensor:
        """Host memory from which a plane comes back."""
        return self.host_of(plane)

    def page_pairs(self, plane: Plane) -> Iterator[tuple[int, int]]:
        """Each page of the device and its page of the host."""
        for first in range(0, self.rows_in(plane), plane.page):
            yield (
                self.page_of(int(plane.moved.slots[first]), plane),
                int(plane.moved.host_slots[first]) // plane.page,
            )

    def rows_in(self, plane: Plane) -> int:
        """Rows in pages that are copied."""
        return len(plane.moved.slots)

    def page_of(self, slot: int, plane: Plane) -> int:
        """Page of a slot of the device."""
        return slot // plane.page


def bits(view: torch.Tensor) -> torch.Tensor:
    """The view as bytes if its numbers are of 8 bits."""
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view


def store_slots(plane: Plane) -> None:
    """Copy rows to the host slot by slot. The host waits."""
    rows = plane.device[_places(plane.device, plane.moved.slots)]
    plane.host[_places(plane.host, plane.moved.host_slots)] = rows.cpu()


def load_slots(plane: Plane) -> None:
    """Copy rows to the device slot by slot. The host waits."""
    rows = plane.host[_places(plane.host, plane.moved.host_slots)].to(plane.device.device)
    plane.device[_places(plane.device, plane.moved.slots)] = rows


def _places(view: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots.to(view.device)
    return slots // view.shape[1], slots % view.shape[1]


class OffloadParent(Copies, DenseBackend):
    """Healthy parent: K and V of one group, of MLA too. A forward waits for its layer, a replay for all."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"decode"},
        graph={"decode"},
        heads={"families": {"gqa", "mqa", "mla"}, "head_dims": {64}, "mla_rope_dims": {64}, "gqa_ratios": {4}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {4, 16}},
        options={"logit_cap": False, "sinks": False},
        windows={"modes": set()},
        offloads=Offloads(LAYOUTS, by_layer=True),
    )

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.init_forward_metadata_in_graph(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """A replay runs no Python, so it waits beforehand."""
        self.wait_for_all()

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        self.wait_for(layer.layer_id)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


class OffloadGroups(Copies, GroupedBackend):
    """Healthy parent: K and V of two groups, one of which has a window. The server waits."""

    capabilities = GroupedBackend.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, offloads=Offloads(LAYOUTS)
    )


class OffloadFormats(Copies, RowFormatsBackend):
    """Healthy parent: rows of a format with scales in memory of their own. The server waits."""

    capabilities = RowFormatsBackend.capabilities.with_changes(
        eager={"decode"}, graph={"decode"},
        kv_pool={"kv_dtypes": {"int8_per_token_head_apart"}, "page_sizes": {4, 16}},
        offloads=Offloads(LAYOUTS),
    )  # fmt: skip


class OffloadIndices(Copies, IndexerParent):
    """Healthy parent: latent rows or one head, and index keys with their scales. The server waits."""

    capabilities = IndexerParent.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, heads={"families": {"mla"}, "gqa_ratios": {4}, "head_dims": {64}},
        offloads=Offloads(LAYOUTS, memory={"keys", "index_keys"}),
    )  # fmt: skip

    @override
    def every_plane(self, transfer: Transfer) -> Iterator[Plane]:
        yield from super().every_plane(transfer)
        pool, host = self.context.index_pool, transfer.host.index_keys
        if pool is not None and host is not None:
            for layer_id in pool.layer_ids:
                own = pool.get_keys(layer_id), pool.get_scales(layer_id)
                for kind, (device, rows) in enumerate(zip(own, host.parts[layer_id], strict=True)):
                    yield Plane(layer_id, kind, bits(device), bits(rows), transfer.keys[0])

    @override
    def leave(self, plane: Plane) -> None:
        if plane.device.shape[1] == plane.host.shape[1]:
            super().leave(plane)
        else:  # index keys have other pages on the device
            store_slots(plane)

    @override
    def bring_back(self, plane: Plane) -> None:
        if plane.device.shape[1] == plane.host.shape[1]:
            super().bring_back(plane)
        else:
            load_slots(plane)


class OffloadStates(Copies, StateParent):
    """Healthy parent: windows and states, a slot at a time. The server waits."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, heads={"gqa_ratios": {2}, "head_dims": {32}},
        state=State(k_dims={32}), bounds={"max_topk": 0}, offloads=Offloads(LAYOUTS, memory={"states"}),
    )  # fmt: skip

    @override
    def every_plane(self, transfer: Transfer) -> Iterator[Plane]:
        assert transfer.host.states is not None
        if transfer.state is None:
            return
        for layer in self.states.layers:
            pool = self.states.pool
            own = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
            for kind, (device, rows) in enumerate(zip(own, transfer.host.states.parts[layer.layer_id], strict=True)):
                yield Plane(layer.layer_id, kind, device[:, None], rows, transfer.state)
