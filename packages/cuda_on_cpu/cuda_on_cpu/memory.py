"""Memory of a graph: address ranges, in its private pool or outside; the latter are held only weakly."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu.large_memory import Saved, is_large
from cuda_on_cpu.private import (
    disable_functions,
    dtype_of,
    inference,
    raw_storage,
    storage_from_weak,
    weak_reference,
)
from cuda_on_cpu.sites import Site, site_of
from cuda_on_cpu.tags import allocated_at


def fill_storage(storage: torch.UntypedStorage, byte: int | None) -> None:
    """Set every byte of memory that the caller keeps alive to `byte`. Do nothing for None, or for large memory."""
    if byte is not None and storage.nbytes() and not is_large(storage.nbytes()):
        ctypes.memset(storage.data_ptr(), byte, storage.nbytes())


def give_back_free_memory() -> None:
    """Make the C library return the free memory of its heap. Does nothing without glibc."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return ctypes.CDLL(None).malloc_trim
    return None


@functools.cache
def _empty(dtype: torch.dtype) -> Tensor:
    with inference():
        return torch.empty(0, dtype=dtype)


_Geometry = tuple[torch.dtype, int | torch.SymInt, torch.Size, tuple[int, ...]]


class Block:
    """One storage that a graph uses.

    `owner` is set for memory of the graph's own pool only. Other memory is outside: it may be freed at any time, and
    its address must not be used before `trouble()` has checked that it is still the same memory. `nbytes` and `address`
    are those of the graph's first use of the storage. `number` grows with the time of the first use. `movable`: only
    aliases that this block made use the address.
    """

    __slots__ = (
        "_aliases", "_raw", "address", "dead", "key", "movable", "nbytes", "number", "owner", "place", "saved",
        "weak",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, number: int, *, in_pool: bool) -> None:
        self.number = number
        self.key = storage._cdata
        self.owner = storage if in_pool else None
        self.weak = None if in_pool else weak_reference(storage)
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.place = allocated_at(self.key)
        self.saved: Saved | None = None
        self.dead = False
        self.movable = in_pool
        self._raw: torch.UntypedStorage | None = None
        self._aliases: dict[_Geometry, Tensor] = {}

    @property
    def site(self) -> Site:
        """Line that allocated the block."""
        return site_of(self.place)

    @property
    def raw(self) -> torch.UntypedStorage:
        """A storage at the address that does not own its memory. Not for memory of 0 bytes."""
        if self._raw is None:
            self._raw = raw_storage(self.address, self.nbytes)
        return self._raw

    @property
    def in_pool(self) -> bool:
        """True if the graph owns this memory, so its address stays valid."""
        return self.owner is not None

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor with the geometry of `tensor` on the address; it keeps nothing alive."""
        geometry = (dtype_of(tensor), int(tensor.storage_offset()), tensor.size(), tensor.stride())
        alias = self._aliases.get(geometry)
        if alias is not None:
            return alias
        if torch.is_inference_mode_enabled():
            return self._new_alias(*geometry)
        with inference():  # replays run in it
            return self._new_alias(*geometry)

    def _new_alias(
        self, dtype: torch.dtype, offset: int | torch.SymInt, size: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        if not self.nbytes:
            return torch.empty_strided(size, stride, dtype=dtype)
        alias = _empty(dtype).detach().set_(self.raw, offset, size, stride)
        self._aliases[dtype, offset, size, stride] = alias
        return alias

    def moved(self, storage: torch.UntypedStorage) -> bool:
        """True if `storage` has moved since the graph first used it."""
        return storage.data_ptr() != self.address or storage.nbytes() != self.nbytes

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Take the new address of new pool memory that was resized before its first use."""
        self._aliases.clear()
        self._raw = None
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()

    def move_into(self, other: Block) -> None:
        """Use the memory of `other`, which has the same size and is unused during this block's life; free its own."""
        with disable_functions(), inference():
            for alias in self._aliases.values():
                alias.set_(other.raw, alias.storage_offset(), alias.size(), alias.stride())
        self.owner, self._raw, self.address = other.owner, other.raw, other.address

    def trouble(self) -> str | None:
        """Text about what happened to the address; None while it is valid."""
        storage = self.owner if self.weak is None else storage_from_weak(self.weak)
        if storage is None:
            return "freed"
        if storage.data_ptr() != self.address:
            return "moved (resized or replaced)"
        return "shrunk" if storage.nbytes() < self.nbytes else None

    def save(self) -> None:
        """Keep the present content, before the capture changes it."""
        if self.owner is None and self.saved is None and self.nbytes:
            self.saved = Saved(self.address, self.nbytes)

    def restore(self) -> None:
        """Undo the changes of the capture, if the memory still exists."""
        if self.saved is not None and self.trouble() is None:
            self.saved.put_back()
        self.saved = None

    def fill(self, byte: int | None) -> None:
        """Fill pool memory with `byte`."""
        if self.owner is not None and not self.moved(self.owner):
            fill_storage(self.owner, byte)

    def replace_by_filled_buffer(self, byte: int) -> None:
        """Replace memory that is gone: everything that was recorded on it uses a private buffer of `byte` from now
        on."""
        buffer = torch.full((max(self.nbytes, 1),), byte, dtype=torch.uint8).untyped_storage()
        with torch.inference_mode():
            for alias in self._aliases.values():
                alias.set_(buffer, alias.storage_offset(), alias.size(), alias.stride())
        self.weak, self.owner = None, buffer
        self.key, self.address, self.nbytes = buffer._cdata, buffer.data_ptr(), buffer.nbytes()
