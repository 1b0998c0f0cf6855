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
from typing import Any

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


Block = tuple[Sequence[Array], tuple[int, ...], Any]
"""An access of a program: every sum of one element of each of some arrays; the shape of the block, masked elements
included; and the index of the elements whose mask is on."""
_Access = tuple[Block, int, int, int, Array | None]
"""A block, bytes of an element, first address, the address after the last; of a store True for what it changes."""


class Lanes:
    """Accesses of the program that runs, since its last barrier, by the start of their memory. ``together``: of several
    programs that run at once, whose blocks have one more axis in front."""

    def __init__(self, together: bool = False) -> None:
        self._front = 1 if together else 0
        self._loads: dict[int, list[_Access]] = {}
        self._stores: dict[int, list[_Access]] = {}

    def copy(self) -> Lanes:
        """A copy, with which some of the programs go on."""
        made = Lanes(self._front > 0)
        made._loads = {memory: list(found) for memory, found in self._loads.items()}
        made._stores = {memory: list(found) for memory, found in self._stores.items()}
        return made

    def meet(self) -> None:
        """A barrier, or the begin of another program."""
        self._loads.clear()
        self._stores.clear()

    def load(self, memory: int, block: Block, size: int, first: int, end: int) -> int | None:
        """Note a load. Returns an address that another thread stores to, with no barrier between; or None."""
        access: _Access = (block, size, first, end, None)
        if block[1]:  # a number is loaded by every thread, and used by the one that has loaded it
            _append(self._loads, memory, access)
        return _first_conflict(self._stores[memory], access, self._front) if memory in self._stores else None

    def store(
        self, memory: int, block: Block, size: int, first: int, end: int, changed: Array
    ) -> tuple[int, str] | None:
        """Note a store. Returns an address that another thread uses, with no barrier between, and how; or None."""
        access: _Access = (block, size, first, end, changed)
        for does, others in (("loads from", self._loads), ("stores to", self._stores)):
            found = _first_conflict(others[memory], access, self._front) if memory in others else None
            if found is not None:
                return found, does
        _append(self._stores, memory, access)
        return None


def _append(known: dict[int, list[_Access]], memory: int, access: _Access) -> None:
    accesses = known.get(memory)
    if accesses is None:
        known[memory] = [access]
        return
    if len(accesses) >= _MOST_ACCESSES:
        del accesses[0]
    accesses.append(access)


def _first_conflict(earlier: Sequence[_Access], access: _Access, front: int) -> int | None:
    _, size, first, end, _ = access
    for other in earlier:
        if other[2] < end and first < other[3] and other[1] == size:
            found = _conflict(other, access, front)
            if found is not None:
                return found
    return None


def _conflict(one: _Access, two: _Access, front: int) -> int | None:
    """An address that two threads use: elements of different blocks, or different elements of blocks of one shape."""
    shape, other_shape = one[0][1][front:], two[0][1][front:]
    if max(math.prod(shape), math.prod(other_shape)) <= _WARP:
        return None
    alike = [n for n in shape if n != 1] == [n for n in other_shape if n != 1]
    (old, old_lanes), (new, new_lanes) = _places(one, front), _places(two, front)
    if not old.size or not new.size:
        return None
    order = np.lexsort((old_lanes, old))
    old, old_lanes = old[order], old_lanes[order]
    left, right = np.searchsorted(old, new, "left"), np.searchsorted(old, new, "right") - 1
    meets = right >= left
    if alike:
        meets &= (old_lanes[np.minimum(left, old.size - 1)] != new_lanes) | (old_lanes[right] != new_lanes)
    return int(new[meets][0]) if meets.any() else None


def _places(access: _Access, front: int) -> tuple[Array, Array]:
    """Addresses, and for each the number of its element in the block. Of a store those that it changes."""
    (parts, shape, where), _, _, _, changed = access
    own = shape[front:]
    lanes = np.broadcast_to(np.arange(math.prod(own)).reshape(own), shape)[where]
    addresses = np.broadcast_to(functools.reduce(np.add, parts), lanes.shape)
    if changed is None:
        return addresses.reshape(-1), lanes.reshape(-1)
    return addresses[changed], lanes[changed]
