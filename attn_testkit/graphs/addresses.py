"""Memory of a GPU at an address that the caller chooses, by CUDA's virtual memory management.

Addresses are reserved separately from memory, so a pool across a multiple of 4 GiB needs no extra memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .driver import Refused, driver_api, value_of


def map_across(multiple: int, nbytes: int, below: int) -> torch.Tensor | None:
    """Map [nbytes] uint8 on the current device, so that a multiple of ``multiple`` is right after the first ``below``
    bytes. The memory is freed with the last tensor that uses it.

    ``multiple`` is a power of 2, and at least the size that the driver maps, 2 MiB. None if the ``cuda-bindings``
    package, on which torch's builds for CUDA depend, is missing, or the driver has no room.
    """
    driver = driver_api()
    if driver is None:
        return None
    try:
        return torch.as_tensor(_Mapping(driver, multiple, nbytes, below), device="cuda")
    except Refused:
        return None


class _Mapping:
    """Mapped memory, in the form for ``torch.as_tensor``: the tensor's storage keeps this object alive."""

    def __init__(self, driver: Any, multiple: int, nbytes: int, below: int) -> None:
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = torch.cuda.current_device()
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location = location
        access = driver.CUmemAccessDesc()
        access.location = location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        piece = value_of(driver.cuMemGetAllocationGranularity(kind, driver.CUmemAllocationGranularity_flags(0)))
        first, end = math.ceil(below / piece) * piece, math.ceil((nbytes - below) / piece) * piece
        reserved = 2 * multiple + first + end
        start = int(value_of(driver.cuMemAddressReserve(reserved, 0, 0, 0)))
        undo: list[tuple[Any, ...]] = [(driver.cuMemAddressFree, start, reserved)]
        self._finalize = weakref.finalize(self, _give_back, undo)
        # A multiple that has room before it: the reservation may begin with one.
        boundary = math.ceil((start + first) / multiple) * multiple
        memory = value_of(driver.cuMemCreate(first + end, kind, 0))
        undo.append((driver.cuMemRelease, memory))
        value_of(driver.cuMemMap(boundary - first, first + end, 0, memory, 0))
        undo.append((driver.cuMemUnmap, boundary - first, first + end))
        value_of(driver.cuMemSetAccess(boundary - first, first + end, [access], 1))
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (boundary - below, False), "version": 2,
        }  # fmt: skip


def _give_back(undo: Sequence[tuple[Any, ...]]) -> None:
    """Undo a mapping, the last part first, once no kernel uses it."""
    if len(undo) > 1:
        torch.cuda.synchronize()
    for function, *arguments in reversed(undo):
        function(*arguments)
