"""Pinned memory that is written again while an asynchronous copy from it may be pending. On a GPU such a copy reads the
memory when the device reaches it. Here the copy is made at once; its bytes are kept, and compared when the host waits
for anything, or when the memory is copied again. If the bytes changed between two waits, the write may have been too
early. Waits that torch does not make, such as in another thread, raise no error.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from cuda_on_cpu.accesses import Access
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.private import StorageWeakRef, is_gone, weak_reference
from cuda_on_cpu.sites import Site, Spot, author_spot, site_of
from cuda_on_cpu.tags import is_pinned

_MOST_BYTES = 1 << 24


class _Copy(NamedTuple):
    storage: StorageWeakRef
    address: int
    read: bytes
    what: str
    place: Spot | Site
    changed: bool = False
    """True if its source has held other bytes since."""


class PendingCopies:
    """Copies from pinned memory that the host has not waited for yet."""

    __slots__ = ("_bytes", "pending")

    def __init__(self) -> None:
        self.pending: list[_Copy] = []
        self._bytes = 0

    def add(self, target: Tensor, source: Tensor, what: str) -> None:
        """Note the begin of an asynchronous copy. Raises EmulationError like ``settle``. Call it with function modes
        off.

        For another dtype, or with gaps, torch makes a host copy first.
        """
        plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if source.nbytes and plain and is_pinned(source):
            self.read(weak_reference(source.untyped_storage()), source.data_ptr(), source.nbytes, what, author_spot())

    def read(self, storage: StorageWeakRef, address: int, size: int, what: str, place: Spot | Site) -> None:
        """Note that an asynchronous copy reads memory of `storage`. Raises EmulationError like ``settle``."""
        self._refuse_changed()
        if self._bytes + size > _MOST_BYTES:
            self.forget()
        self.pending.append(_Copy(storage, address, ctypes.string_at(address, size), what, place))
        self._bytes += size

    def was_written(self, access: Access) -> None:
        """Note that the host wrote memory by a visible operation, which may write the old bytes again."""
        for i, copy in enumerate(self.pending):
            if copy.address < access.end and access.first < copy.address + len(copy.read) and _differs(copy):
                self.pending[i] = copy._replace(changed=True)

    def device_writes(self, first: int, end: int) -> None:
        """Note that a device copy will write memory after the copies that read it, so the host did not write it."""
        self.pending = [
            copy
            for copy in self.pending
            if end <= copy.address or copy.address + len(copy.read) <= first or copy.changed or _differs(copy)
        ]
        self._bytes = sum(len(copy.read) for copy in self.pending)

    def settle(self) -> None:
        """Compare all copies, because the host waited. Raises EmulationError if memory of a copy was written before."""
        try:
            self._refuse_changed()
        finally:
            self.forget()

    def forget(self) -> None:
        """Forget all copies, because the host waited for unknown work."""
        self.pending.clear()
        self._bytes = 0

    def _refuse_changed(self) -> None:
        for copy in self.pending:
            if copy.changed or _differs(copy):
                self.forget()
                raise EmulationError(
                    copy.what,
                    site_of(copy.place),
                    "the copy is asynchronous, and its pinned source was written again before the host had waited for"
                    " it: a device that is busy reads the new bytes in place of those that were meant",
                    "alternate between two buffers, or record an event after the copy and wait for it before the"
                    " buffer is filled again",
                )


def _differs(copy: _Copy) -> bool:
    """True if its source has other bytes. Pinned memory that was freed is not allocated again while a copy is
    pending."""
    return not is_gone(copy.storage) and ctypes.string_at(copy.address, len(copy.read)) != copy.read
