"""Threads of one program that use one location, with no barrier between them.

A program's elements are spread over the threads of several warps, which run at once. Nothing orders a load of one
thread and a store of another: Triton adds barriers for its own shared memory, and none for global memory. Threads are
not known here, but two accesses that give a location to the same element of blocks of the same shape belong to one.
Every operation that may exchange elements between threads counts as a barrier, whether or not it needs one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_WARP = 32
_MOST_ACCESSES = 64
_EXCHANGES = frozenset(
    {"create_dot", "create_dot_scaled", "create_trans", "create_reshape", "create_cat", "create_join", "create_split",
     "create_unsplat", "create_histogram", "create_gather", "T"}
)  # fmt: skip


def exchanges(name: object) -> bool:
    """True if an operation may exchange elements between threads: of the builder, or a reduction or a scan."""
    return isinstance(name, tuple) or name in _EXCHANGES


class Block(NamedTuple):
    """An access of a program: every sum of one element of each of ``parts``, where the mask is on."""

    parts: Sequence[Array]
    shape: tuple[int, ...]
    """Shape of the block, masked elements included."""
    where: Any
    """Index of the elements whose mask is on."""


class _Access(NamedTuple):
    block: Block
    size: int
    first: int
    end: int
    writes: bool
    changed: Array | None
    """True for elements that a store changes."""

    @property
    def shape(self) -> list[int]:
        """Shape of the block without axes of length 1."""
        return [n for n in self.block.shape if n != 1]

    def places(self) -> tuple[Array, Array]:
        """Addresses, and for each the number of its element in the block. Of a store those that it changes."""
        lanes = np.arange(math.prod(self.block.shape)).reshape(self.block.shape)[self.block.where]
        addresses = np.broadcast_to(functools.reduce(np.add, self.block.parts), lanes.shape)
        if self.changed is None:
            return addresses.reshape(-1), lanes.reshape(-1)
        return addresses[self.changed], lanes[self.changed]


class Lanes:
    """Accesses of the program that runs, since its last barrier, by the start of their memory."""

    def __init__(self) -> None:
        self._loads: dict[int, list[_Access]] = {}
        self._stores: dict[int, list[_Access]] = {}

    def meet(self) -> None:
        """A barrier, or the begin of another program."""
        self._loads.clear()
        self._stores.clear()

    def load(self, memory: int, block: Block, size: int, first: int, end: int) -> int | None:
        """Note a load. Returns an address that another thread stores to, with no barrier between; or None."""
        access = _Access(block, size, first, end, False, None)
        found = None
        if memory in self._stores:
            found = _first_conflict(self._stores[memory], access)
        if block.shape:  # a number is loaded by every thread, and used by the one that has loaded it
            _append(self._loads.setdefault(memory, []), access)
        return found

    def store(
        self, memory: int, block: Block, size: int, first: int, end: int, changed: Array
    ) -> tuple[int, str] | None:
        """Note a store. Returns an address that another thread uses, with no barrier between, and how; or None."""
        access = _Access(block, size, first, end, True, changed)
        for does, others in (("loads from", self._loads), ("stores to", self._stores)):
            found = _first_conflict(others[memory], access) if memory in others else None
            if found is not None:
                return found, does
        _append(self._stores.setdefault(memory, []), access)
        return None


def _append(accesses: list[_Access], access: _Access) -> None:
    if len(accesses) >= _MOST_ACCESSES:
        del accesses[0]
    accesses.append(access)


def _first_conflict(earlier: Sequence[_Access], access: _Access) -> int | None:
    for other in earlier:
        if other.first < access.end and access.first < other.end and other.size == access.size:
            found = _conflict(other, access)
            if found is not None:
                return found
    return None


def _conflict(one: _Access, two: _Access) -> int | None:
    """An address that two threads use: elements of different blocks, or different elements of blocks of one shape."""
    if max(math.prod(one.block.shape), math.prod(two.block.shape)) <= _WARP:
        return None
    (old, old_lanes), (new, new_lanes) = one.places(), two.places()
    if not old.size or not new.size:
        return None
    order = np.lexsort((old_lanes, old))
    old, old_lanes = old[order], old_lanes[order]
    left, right = np.searchsorted(old, new, "left"), np.searchsorted(old, new, "right") - 1
    meets = right >= left
    if one.shape == two.shape:
        meets &= (old_lanes[np.minimum(left, old.size - 1)] != new_lanes) | (old_lanes[right] != new_lanes)
    return int(new[meets][0]) if meets.any() else None
