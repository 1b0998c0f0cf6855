"""Fakes of the direct copies of ``sgl_kernel.kvcacheio`` between KV pools of the device and of the host.

The operators copy runs of slots with ``copy_`` on the current stream, from a loop on the host. So do the fakes.
Indices are on the host, [n] int64: slots of pages, page by page.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .refusals import Check, Refusals, refuse, to

_SOURCE = "csrc/kvcacheio/transfer.cu"


def _checks(function: str) -> tuple[Check, ...]:
    source = f"{_SOURCE}:{function}"
    return (
        Check(
            "five source slots and four targets",
            lambda given: {"src_indices": torch.arange(5)},
            lambda given: given.src_indices.numel() == given.dst_indices.numel(),
            "Source and destination indices must have the same length",
            source,
        ),
        Check(
            "a page of no slots",
            to(page_size=0),
            lambda given: given.page_size > 0,
            "Page size must be positive",
            source,
        ),
        Check(
            "four slots of pages of three",
            to(page_size=3),
            lambda given: given.src_indices.numel() % given.page_size == 0,
            "Source indices size must be divisible by page size",
            source,
        ),
    )


DIRECT = (
    Check(
        "two source layers and one target",
        lambda given: {"src_layers": list(given["src_layers"]) * 2},
        lambda given: len(given.src_layers) == len(given.dst_layers),
        "Source and destination layers must have the same number of layers",
        f"{_SOURCE}:transfer_kv_direct",
    ),
    *_checks("transfer_kv_direct"),
)
PAGE_FIRST = _checks("transfer_kv_page_first_direct_impl")


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots [slots, ...] of several buffers, one run of consecutive slots at a time."""
    refuse(
        DIRECT, src_layers=src_layers, dst_layers=dst_layers, src_indices=src_indices, dst_indices=dst_indices,
        page_size=page_size,
    )  # fmt: skip
    sources, targets, first = src_indices.tolist(), dst_indices.tolist(), 0
    for end in range(1, len(sources) + 1):
        if end < len(sources) and (sources[end] - sources[end - 1], targets[end] - targets[end - 1]) == (1, 1):
            continue
        for source, target in zip(src_layers, dst_layers, strict=True):
            held = source[sources[first] : sources[first] + end - first]
            target[targets[first] : targets[first] + end - first].copy_(held, non_blocking=True)
        first = end


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of one layer from pools [pages, layers, page_size, ...] to buffers [slots, ...]: of K and V, or of
    MLA."""
    refuse(PAGE_FIRST, src_indices=src_indices, dst_indices=dst_indices, page_size=page_size)
    for source, target in _pages(src_indices, dst_indices, page_size):
        for held, written in zip(src_ptrs, dst_ptrs, strict=True):
            page = held[source // page_size, layer_id]
            written[target : target + page_size].copy_(page, non_blocking=True)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages of all layers from buffers [slots, ...] to pools [pages, layers, page_size, ...]. ``src_ptrs``: K of
    each layer, then V."""
    refuse(PAGE_FIRST, src_indices=src_indices, dst_indices=dst_indices, page_size=page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for source, target in _pages(src_indices, dst_indices, page_size):
        for number, held in enumerate(src_ptrs):
            page = dst_ptrs[number // layers][target // page_size, number % layers]
            page.copy_(held[source : source + page_size], non_blocking=True)


def _pages(sources: torch.Tensor, targets: torch.Tensor, page_size: int) -> Iterator[tuple[int, int]]:
    """First slots of each page."""
    return zip(sources[::page_size].tolist(), targets[::page_size].tolist(), strict=True)


def _real() -> Any:
    return importlib.import_module("sgl_kernel.kvcacheio")


def _accepted(device: torch.device, implementation: Any) -> dict[str, Any]:
    layers = [torch.zeros(8, 2, device=device)], [torch.zeros(8, 2, device=device)]
    indices = torch.arange(4), torch.arange(4)
    return dict(zip(("src_layers", "dst_layers", "src_indices", "dst_indices"), (*layers, *indices), strict=True)) | {
        "page_size": 2
    }


def _of_pages(device: torch.device, implementation: Any) -> dict[str, Any]:
    given = _accepted(device, implementation)
    sources, targets = [torch.zeros(4, 1, 2, 2, device=device)], given["dst_layers"]
    indices = {"src_indices": given["src_indices"], "dst_indices": given["dst_indices"]}
    return {"src_ptrs": sources, "dst_ptrs": targets, **indices, "layer_id": 0, "page_size": 2}


def _to_pages(device: torch.device, implementation: Any) -> dict[str, Any]:
    given = _of_pages(device, implementation)
    del given["layer_id"]
    return given | {"src_ptrs": given["dst_ptrs"], "dst_ptrs": given["src_ptrs"]}


REFUSALS = tuple(
    Refusals(f"sglang-kernel, {name}", name, sys.modules[__name__], _real, accepted, checks, (80, 129))
    for name, accepted, checks in (
        ("transfer_kv_direct", _accepted, DIRECT),
        ("transfer_kv_per_layer_direct_pf_lf", _of_pages, PAGE_FIRST),
        ("transfer_kv_all_layer_direct_lf_pf", _to_pages, PAGE_FIRST),
    )
)
"""Entry points and their refusals."""
