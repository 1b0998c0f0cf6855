"""Tensors side by side in one piece of memory, so that one transfer takes all of them.

Each begins where an allocator would have it begin, and what lies between them is poison: who reads past the end of one
does not read the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .past_modes import past_modes
from .uploads import upload

__all__ = ["Bytes", "Packing", "Place", "Sent", "bytes_of", "pack_places", "send", "sent_alone"]

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 512
"""Bytes. The device's caching allocator gives memory at multiples of it, and kernels are compiled for such pointers."""
_GUARD = 64
"""Bytes of poison behind each tensor, at the least."""
_NUMPY: Mapping[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


@dataclass(frozen=True)
class Place:
    """Where one tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Its first byte."""

    @property
    def end(self) -> int:
        """The byte behind its last."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """Where all of them lie."""

    places: tuple[Place, ...]
    size: int
    """Bytes, a multiple of 512."""

    def fresh(self) -> Bytes:
        """Host memory for it, all poison."""
        return np.full(self.size, 0xFF, np.uint8)

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in ``memory`` [size] uint8, by name: views."""
        wide: dict[torch.dtype, torch.Tensor] = {}
        found: dict[str, torch.Tensor] = {}
        for place in self.places:
            dtype = place.dtype
            if dtype not in wide:
                wide[dtype] = memory.view(dtype)
            one = wide[dtype][place.start // dtype.itemsize : place.end // dtype.itemsize]
            found[place.name] = one if len(place.shape) == 1 else one.view(place.shape)
        return found

    def arrays(self, memory: Bytes) -> dict[str, npt.NDArray[Any]]:
        """The same on the host. ``memory`` may end before the last of them, which are left out then."""
        return {
            place.name: memory[place.start : place.end].view(_NUMPY[place.dtype]).reshape(place.shape)
            for place in self.places
            if place.end <= len(memory)
        }


@lru_cache(maxsize=256)
def pack_places(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Packing:
    """Lay out tensors of these names, dtypes and shapes, in this order."""
    places: list[Place] = []
    start = 0
    for name, dtype, shape in entries:
        places.append(Place(name, dtype, shape, start))
        start = -(-(places[-1].end + _GUARD) // _ALIGNMENT) * _ALIGNMENT
    return Packing(tuple(places), start)


@dataclass(frozen=True, eq=False)
class Sent:
    """Memory that the kit wrote for a step, and what it wrote there."""

    places: tuple[Place, ...]
    """The tensors in it that a backend may not write."""
    memory: torch.Tensor | Bytes = field(repr=False)
    """[n] uint8: on the device, or an array on the host."""
    before: Bytes = field(repr=False)
    """[n]."""

    def changed(self, now: Bytes) -> Iterator[tuple[Place, Bytes, Bytes]]:
        """Each tensor that no longer holds what it held, with its bytes before and now. ``now`` [n]: all bytes."""
        if np.array_equal(now, self.before):
            return
        for place in self.places:
            before, after = self.before[place.start : place.end], now[place.start : place.end]
            if not np.array_equal(before, after):
                yield place, before, after


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """[n]: the bytes of a contiguous host tensor, not copied."""
    # Without elements it may have any strides.
    raw: Bytes = tensor.view(torch.uint8).numpy().reshape(-1) if tensor.numel() else np.empty(0, np.uint8)
    return raw


def send(named: Mapping[str, torch.Tensor], device: torch.device) -> tuple[dict[str, torch.Tensor], Sent]:
    """Host tensors, together in fresh memory on the device, by name."""
    with past_modes():
        packing = pack_places(tuple((name, each.dtype, tuple(each.shape)) for name, each in named.items()))
        host = packing.fresh()
        for place, tensor in zip(packing.places, named.values(), strict=True):
            host[place.start : place.end] = bytes_of(tensor.contiguous())
    memory = upload(torch.from_numpy(host), device)
    with past_modes():
        return packing.tensors(memory), Sent(packing.places, memory, host)


def sent_alone(name: str, tensor: torch.Tensor, before: Bytes) -> Sent:
    """A flat tensor that has memory of its own, on the device or on the host."""
    memory = tensor.view(torch.uint8) if tensor.is_cuda else tensor.numpy().view(np.uint8)
    return Sent((Place(name, tensor.dtype, tuple(tensor.shape), 0),), memory, before)
