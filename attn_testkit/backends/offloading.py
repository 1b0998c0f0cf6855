"""Copies between the pools of ``torch_native`` and host memory: slot by slot, and page by page on a stream.

Servers have kernels and batched copies of blocks instead, which are faster and must give the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..contract import BackendContext, Moved, Transfer


@dataclass(frozen=True)
class Part:
    """Rows of one kind in one layer, such as K. Slots are counted by two dimensions: pages, and slots of a page."""

    layer_id: int
    device: torch.Tensor
    """[pages, page_size, *row]: a view of the device's pool, as integers of its bits."""
    host: torch.Tensor
    """[pages, page_size, *row]: a view of the host's pool, likewise."""
    moved: Moved


def parts_of(context: BackendContext, transfer: Transfer) -> list[Part]:
    """All rows of a transfer, layer by layer."""
    return sorted(_parts(context, transfer), key=lambda part: part.layer_id)


def _parts(context: BackendContext, transfer: Transfer) -> Iterator[Part]:
    groups = [group for group in context.groups if group.kv_pool.layers]
    for group, moved, host in zip(groups, transfer.keys, transfer.host.keys, strict=True):
        for layer in group.kv_pool.layers:
            if layer.kv_sharing_target_layer_id < 0:
                # The second view of MLA is a part of the first.
                pages = group.kv_pool.get_kv_pages(layer.layer_id)[: layer.head_layout.pool_rows]
                pages += group.kv_pool.get_scale_pages(layer.layer_id)
                yield from _pairs(layer.layer_id, pages, host.parts[layer.layer_id], moved)
    if context.index_pool is not None and transfer.host.index_keys is not None:
        for layer_id in context.index_pool.layer_ids:
            pages = context.index_pool.get_keys(layer_id), context.index_pool.get_scales(layer_id)
            yield from _pairs(layer_id, pages, transfer.host.index_keys.parts[layer_id], transfer.keys[0])
    if context.state is not None and transfer.host.states is not None and transfer.state is not None:
        pool = context.state.pool
        for layer_id in (layer.layer_id for layer in pool.layers):
            # A slot is a page.
            views = pool.conv(layer_id)[:, None], pool.temporal(layer_id)[:, None]
            yield from _pairs(layer_id, views, transfer.host.states.parts[layer_id], transfer.state)


def _pairs(
    layer_id: int, device: tuple[torch.Tensor, ...], host: tuple[torch.Tensor, ...], moved: Moved
) -> Iterator[Part]:
    for ours, theirs in zip(device, host, strict=True):
        yield Part(layer_id, _bits(ours), _bits(theirs), moved)


def _bits(view: torch.Tensor) -> torch.Tensor:
    # torch cannot index FP8 everywhere.
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view


def all_to_host(context: BackendContext, transfer: Transfer) -> None:
    """Copy all rows of a transfer slot by slot. The host waits."""
    for part in parts_of(context, transfer):
        rows = part.device[_places(part.device, part.moved.slots)]
        part.host[_places(part.host, part.moved.host_slots)] = rows.cpu()


def all_to_device(context: BackendContext, transfer: Transfer) -> None:
    """Copy all rows of a transfer slot by slot. The host waits."""
    for part in parts_of(context, transfer):
        rows = part.host[_places(part.host, part.moved.host_slots)]
        part.device[_places(part.device, part.moved.slots)] = rows.to(part.device.device)


def pages_to_host(part: Part) -> None:
    """Start copies of whole pages on the current stream."""
    for ours, theirs in _pages(part):
        theirs.copy_(ours, non_blocking=True)


def pages_to_device(part: Part) -> None:
    """Start copies of whole pages on the current stream."""
    for ours, theirs in _pages(part):
        ours.copy_(theirs, non_blocking=True)


def _pages(part: Part) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = part.device.shape[1]
    first = slice(None, None, size)
    for ours, theirs in zip(part.moved.slots[first].tolist(), part.moved.host_slots[first].tolist(), strict=True):
        yield part.device[ours // size], part.host[theirs // size]


def _places(view: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots.to(view.device)
    return slots // view.shape[1], slots % view.shape[1]
