"""Memory that is too large to copy or to fill: only its touched pages count.

A host allocates memory page by page, zeroed, at the first write. So a device tensor of many gigabytes, of which a
program uses a few rows, costs nothing on a laptop, as long as nothing fills it.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

LARGE = 1 << 30
"""Size in bytes from which memory is not filled, so that it keeps the system's contents."""


def is_large(nbytes: int) -> bool:
    """True for memory of a size that is not filled, and is saved page by page."""
    return nbytes >= LARGE


def _touched(address: int, nbytes: int) -> tuple[int, npt.NDArray[np.bool_]]:
    """First page that begins at or before ``address``, and a flag for each page from there on: True if it is in memory.
    Raises ``OSError`` if the system does not report that.
    """
    page = mmap.PAGESIZE
    first = address // page * page
    count = -(-(address + nbytes - first) // page)
    found = np.zeros(count, np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    done = library.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page), ctypes.c_void_p(found.ctypes.data))
    if done != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return first, found & 1 == 1


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Index of the first of each run of True, and the one after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class Saved:
    """A copy of some memory's contents, to restore them."""

    def __init__(self, address: int, nbytes: int) -> None:
        """Copy all of it or, if it is large, the touched pages."""
        self._address, self._nbytes = address, nbytes
        self._pieces: list[tuple[int, bytes]] = []
        for first, end in self._spans():
            # string_at takes a size of 32 bits, and more than 2 GiB in a row would be cut off without a word.
            for part in range(first, end, LARGE):
                self._pieces.append((part, ctypes.string_at(part, min(LARGE, end - part))))

    def _spans(self) -> list[tuple[int, int]]:
        """Address ranges that count: the first address of each, and the address after its last."""
        if not is_large(self._nbytes):
            return [(self._address, self._address + self._nbytes)]
        page, (start, flags) = mmap.PAGESIZE, _touched(self._address, self._nbytes)
        last = self._address + self._nbytes
        return [(max(self._address, start + a * page), min(last, start + b * page)) for a, b in _runs(flags)]

    def put_back(self) -> None:
        """Restore the memory, which still exists."""
        if is_large(self._nbytes):
            # Pages that were touched since were zeros.
            for first, end in self._spans():
                ctypes.memset(first, 0, end - first)
        for first, held in self._pieces:
            ctypes.memmove(first, held, len(held))
