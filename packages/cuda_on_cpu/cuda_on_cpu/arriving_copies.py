"""Pinned memory that an asynchronous copy from the device writes, before the host has waited for the copy.

On a GPU such a copy is made when the device reaches it; until then the host reads the old contents. Here it is made at
once, and its bytes are held back until the host waits for the copy's stream, or for an event after it. An earlier host
operation that reads or writes the memory is refused, also through NumPy. A read that the emulation cannot see (through
ctypes, for instance) gets the old bytes.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from cuda_on_cpu.accesses import Access, Span, surely_meet
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.private import StorageWeakRef, is_gone, weak_reference
from cuda_on_cpu.sites import Site, Spot, author_spot, site_of
from cuda_on_cpu.stream_state import Clock
from cuda_on_cpu.tags import is_pinned

_MOST_BYTES = 1 << 24


class _Copy(NamedTuple):
    storage: StorageWeakRef
    target: Access
    arrives: bytes
    stream: int
    epoch: int
    what: str
    place: Spot | Site


class ArrivingCopies:
    """Copies to pinned memory that the host has not waited for, the oldest first."""

    __slots__ = ("_bytes", "pending")

    def __init__(self) -> None:
        self.pending: list[_Copy] = []
        self._bytes = 0

    def before(self, target: Tensor) -> bytes | None:
        """Contents of the target of an asynchronous copy that is about to be made; None if the host waits for it.

        The host waits if the target is not pinned, or has gaps, because torch then copies into other memory first.
        """
        size = target.nbytes
        if not (size and is_pinned(target) and target.is_contiguous()):
            return None
        return ctypes.string_at(target.data_ptr(), size)

    def hold(self, target: Tensor, before: bytes, stream: int, epoch: int, what: str) -> None:
        """Keep the bytes of a copy that was made, and restore those from ``before``. Call it with function modes
        off."""
        if self._bytes + len(before) > _MOST_BYTES:
            self.arrive()
        self.hold_at(weak_reference(target.untyped_storage()), target.data_ptr(), before, stream, epoch, what)

    def hold_at(self, storage: StorageWeakRef, first: int, before: bytes, stream: int, epoch: int, what: str) -> None:
        """Keep the bytes of a copy to the memory of ``storage`` from the address ``first`` on."""
        arrives = ctypes.string_at(first, len(before))
        ctypes.memmove(first, before, len(before))
        access = Access(first, first + len(before), Span.ALL, True)
        self.pending.append(_Copy(storage, access, arrives, stream, epoch, what, author_spot()))
        self._bytes += len(before)

    def arrive(self, known: Clock | None = None) -> None:
        """Write the held bytes of the copies before ``known``, because the host waited; None: of all copies."""
        late = []
        for copy in self.pending:
            if known is not None and known.get(copy.stream, 0) < copy.epoch:
                late.append(copy)
            else:
                self._put(copy)
        self.pending = late
        self._bytes = sum(len(copy.arrives) for copy in late)

    def arrive_in(self, used: Access) -> None:
        """Release the held bytes of memory that the device uses. The device uses it after its own copies."""
        touched = [copy for copy in self.pending if copy.target.first < used.end and used.first < copy.target.end]
        if touched:
            # In the order in which they were made: one may overlap another.
            self.arrive()

    def refuse(self, access: Access, what: str) -> None:
        """Check a host access. Raises EmulationError if a copy to the memory may not have been made."""
        for copy in self.pending:
            if not is_gone(copy.storage) and surely_meet(copy.target, access):
                self.arrive()
                raise EmulationError(
                    what,
                    site_of(author_spot()),
                    f"it {'writes' if access.writes else 'reads'} pinned memory on the host that {copy.what} at"
                    f" {site_of(copy.place)} copies to, asynchronously, and the host has not waited for that copy: it"
                    " finds what was there before",
                    "record an event after the copy and wait for it (or ask event.query()) before the memory is used,"
                    " or take the lengths that the server has on the host",
                )

    def _put(self, copy: _Copy) -> None:
        if not is_gone(copy.storage):
            ctypes.memmove(copy.target.first, copy.arrives, len(copy.arrives))
