"""Pinned memory that is written again while an asynchronous copy from it may be pending.

On a GPU such a copy reads the memory when the device comes to it. Here it is made at once; the bytes are kept, and
compared when the host waits for anything, or when the memory is copied from once more. A write of other bytes between
two waits may have been too early. Waits by other means than torch's, such as another thread, raise no error.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from attn_testkit.emulation.errors import EmulationError
from attn_testkit.emulation.private import StorageWeakRef, is_gone, weak_reference
from attn_testkit.emulation.sites import Site, Spot, author_spot, site_of
from attn_testkit.emulation.tags import is_pinned

_MOST_BYTES = 1 << 24


class _Copy(NamedTuple):
    storage: StorageWeakRef
    address: int
    read: bytes
    what: str
    place: Spot | Site


class PendingCopies:
    """Copies from pinned memory that the host has not waited for yet."""

    __slots__ = ("_bytes", "_copies")

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._bytes = 0

    def add(self, target: Tensor, source: Tensor, what: str) -> None:
        """Note the begin of an asynchronous copy. Raises EmulationError like ``settle``. Call it with function modes
        off.

        For another dtype, or with gaps, torch makes a host copy first.
        """
        size = source.nbytes
        plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if not (size and plain and is_pinned(source)):
            return
        self._refuse_changed()
        if self._bytes + size > _MOST_BYTES:
            self.forget()
        address = source.data_ptr()
        read = ctypes.string_at(address, size)
        self._copies.append(_Copy(weak_reference(source.untyped_storage()), address, read, what, author_spot()))
        self._bytes += size

    def settle(self) -> None:
        """Compare all copies, because the host waited. Raises EmulationError if memory of a copy was written before."""
        try:
            self._refuse_changed()
        finally:
            self.forget()

    def forget(self) -> None:
        """Forget all copies, because it is unknown what was waited for."""
        self._copies.clear()
        self._bytes = 0

    def _refuse_changed(self) -> None:
        for copy in self._copies:
            # Pinned memory that is gone is given to nobody while a copy from it is pending.
            if not is_gone(copy.storage) and ctypes.string_at(copy.address, len(copy.read)) != copy.read:
                self.forget()
                raise EmulationError(
                    copy.what,
                    site_of(copy.place),
                    "the copy is asynchronous, and its pinned source was written again before the host had waited for"
                    " it: a device that is busy reads the new bytes in place of those that were meant",
                    "alternate between two buffers, or record an event behind the copy and wait for it before the"
                    " buffer is filled again",
                )
