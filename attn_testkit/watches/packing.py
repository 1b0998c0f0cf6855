"""Tensors packed into one block of memory, so that one transfer copies all of them.

Each is aligned as by an allocator, with poison between them: reading past the end of one does not read the next. After
page numbers, slots and activations the poison is -1 or NaN. After lengths and offsets, -1 would end each loop at once,
so that a program for a request after the last one would do nothing: there the poison is valid-looking numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuda_on_cpu import confine

from .past_modes import past_modes
from .uploads import upload

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 512
"""Alignment of the device's caching allocator in bytes; kernels are compiled for such pointers."""
_GUARD = 64
"""Least number of bytes of poison after each tensor."""
_LENGTHS = frozenset({
    *("seq_lens", "extend_seq_lens", "extend_seq_lens_tensor", "extend_prefix_lens", "extend_start_loc"),
    *("query_start_loc", "cu_window_seqlens", "num_accept_tokens", "num_correct_drafts", "snapshot_rows"),
})  # fmt: skip
"""Last parts of the names of tensors that hold lengths and offsets."""
_BEHIND_LENGTHS = (2, 1_000_003)
"""Numbers that follow lengths, in turn: one that points into rows of others, and one beyond all rows and keys."""
_GUARD_OF_LENGTHS = 512
"""Least number of bytes after a tensor of lengths: a tile of 64 requests, or of 128."""
_NUMPY: Mapping[torch.dtype, type[np.generic]] = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


@dataclass(frozen=True)
class Place:
    """The place of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Index of its first byte."""

    @property
    def end(self) -> int:
        """Index of the byte after its last."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """The places of all tensors."""

    places: tuple[Place, ...]
    size: int
    """Number of bytes, a multiple of 512."""

    def fresh(self) -> Bytes:
        """Allocate host memory for it, filled with poison."""
        return self._poison.copy()

    @cached_property
    def _poison(self) -> Bytes:
        found = np.full(self.size, 0xFF, np.uint8)
        for place, end in zip(self.places, [*(each.start for each in self.places[1:]), self.size], strict=True):
            if _is_length(place.name):
                behind = found[place.end : end].view(_NUMPY[place.dtype])
                behind[:] = np.resize(_BEHIND_LENGTHS, len(behind))
        return found

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in ``memory`` [size] uint8 by name, as views, which no emulated Triton kernel may leave."""
        wide: dict[torch.dtype, torch.Tensor] = {}
        found: dict[str, torch.Tensor] = {}
        for place in self.places:
            dtype = place.dtype
            if dtype not in wide:
                wide[dtype] = memory.view(dtype)
            one = wide[dtype][place.start // dtype.itemsize : place.end // dtype.itemsize]
            found[place.name] = one if len(place.shape) == 1 else one.view(place.shape)
        confine(*found.values())
        return found

    def arrays(self, memory: Bytes) -> dict[str, npt.NDArray[Any]]:
        """The arrays in host ``memory`` by name. If it ends early, the last ones are left out."""
        return {
            place.name: memory[place.start : place.end].view(_NUMPY[place.dtype]).reshape(place.shape)
            for place in self.places
            if place.end <= len(memory)
        }


def _is_length(name: str) -> bool:
    return name.rpartition(".")[2] in _LENGTHS


@lru_cache(maxsize=256)
def pack_places(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Packing:
    """Lay out tensors of these names, dtypes and shapes, in this order."""
    places: list[Place] = []
    start = 0
    for name, dtype, shape in entries:
        places.append(Place(name, dtype, shape, start))
        guard = _GUARD_OF_LENGTHS if _is_length(name) else _GUARD
        start = -(-(places[-1].end + guard) // _ALIGNMENT) * _ALIGNMENT
    return Packing(tuple(places), start)


@dataclass(frozen=True, eq=False)
class Sent:
    """Memory that the kit wrote for a step, and its contents."""

    places: tuple[Place, ...]
    """The tensors in it that a backend may not write."""
    memory: torch.Tensor | Bytes = field(repr=False)
    """Memory [n] uint8: on the device, or an array on the host."""
    before: Bytes = field(repr=False)
    """Contents [n] that were written."""

    def changed(self, now: Bytes) -> Iterator[tuple[Place, Bytes, Bytes]]:
        """Each tensor that changed, with its earlier and its present bytes. ``now`` [n]: all bytes."""
        if np.array_equal(now, self.before):
            return
        for place in self.places:
            before, after = self.before[place.start : place.end], now[place.start : place.end]
            if not np.array_equal(before, after):
                yield place, before, after


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Bytes [n] of a contiguous host tensor, not copied."""
    # An empty tensor may have any strides.
    raw: Bytes = tensor.view(torch.uint8).numpy().reshape(-1) if tensor.numel() else np.empty(0, np.uint8)
    return raw


def send(named: Mapping[str, torch.Tensor], device: torch.device) -> tuple[dict[str, torch.Tensor], Sent]:
    """Send host tensors to fresh memory on the device, together; return them by name."""
    with past_modes():
        packing = pack_places(tuple((name, each.dtype, tuple(each.shape)) for name, each in named.items()))
        host = packing.fresh()
        for place, tensor in zip(packing.places, named.values(), strict=True):
            # One element of a row counts as contiguous, and cannot be seen as bytes.
            host[place.start : place.end] = bytes_of(tensor.clone(memory_format=torch.contiguous_format))
    memory = upload(torch.from_numpy(host), device)
    with past_modes():
        return packing.tensors(memory), Sent(packing.places, memory, host)


def sent_alone(name: str, tensor: torch.Tensor, before: Bytes) -> Sent:
    """Describe a flat tensor with its own memory, on the device or on the host."""
    memory = tensor.view(torch.uint8) if tensor.is_cuda else tensor.numpy().view(np.uint8)
    return Sent((Place(name, tensor.dtype, tuple(tensor.shape), 0),), memory, before)
