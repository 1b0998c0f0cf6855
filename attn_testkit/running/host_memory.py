"""Memory that is free but still held by the C library's allocator, given back to the system.

A case with one long request or many wide heads needs some hundred megabytes for a moment. The allocator keeps them in
pieces, and a judge with its workers would each stay as large as their largest case.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__ = ["Trimmer"]

_GROWN = 1 << 27
"""Bytes that a process may grow by between two rounds."""


class Trimmer:
    """Gives back what is free when the process has grown by an eighth of a gigabyte. Does nothing without glibc."""

    def __init__(self) -> None:
        self._trim = None
        with contextlib.suppress(OSError, AttributeError):
            self._trim = ctypes.CDLL(None).malloc_trim
        self._size = _resident()

    def after_case(self) -> None:
        """To be called where large temporary objects are gone."""
        if self._trim is not None and _resident() > self._size + _GROWN:
            self._trim(0)
            self._size = _resident()


def _resident() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
