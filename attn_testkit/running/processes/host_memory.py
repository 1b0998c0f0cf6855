"""Memory that is free but still held by the C library's allocator, given back to the system.

A case with one long request or many wide heads needs some hundred megabytes for a moment. The allocator keeps them in
pieces, and a judge with its workers would each stay as large as their largest case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_GROWN = 1 << 27
"""Bytes that a process may grow by between two rounds."""
_HEAP, _KEPT = 1 << 25, 1 << 28
"""Bytes up to which memory comes from the heap, and of free heap that is kept until a round. glibc by itself gives
large tensors back whenever they go, and the system then clears each page of the next one."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's ``mallopt``."""


class Trimmer:
    """Returns free memory to the system when the process has grown by an eighth of a gigabyte. Does nothing without
    glibc."""

    def __init__(self) -> None:
        self._trim = None
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            self._trim = library.malloc_trim
            library.mallopt(_MMAP_THRESHOLD, _HEAP)
            library.mallopt(_TRIM_THRESHOLD, _KEPT)
        self._size = _resident()

    def after_case(self) -> None:
        """Give memory back to the system. Call it after large temporary objects are gone."""
        if self._trim is not None and _resident() > self._size + _GROWN:
            self._trim(0)
            self._size = _resident()


def _resident() -> int:
    return bytes_of_process(_RESIDENT)


ADDRESSES, _RESIDENT = 0, 1
"""Fields of ``/proc/self/statm``."""


def bytes_of_process(field: int) -> int:
    """A size of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
