"""Memory pools: captures that share a pool may reuse memory that an earlier one dropped."""

from __future__ import annotations

import itertools
import weakref

from cuda_on_cpu.capture import Capture
from cuda_on_cpu.memory import Block

PoolHandle = tuple[int, int]


class Pool:
    """Captures that share memory. It holds them weakly: a graph that is reset or dies leaves its pools."""

    def __init__(self, handle: PoolHandle) -> None:
        self.handle = handle
        self.captures: weakref.WeakSet[Capture] = weakref.WeakSet()

    def reusable(self) -> list[Block]:
        """Blocks of earlier captures that the next one may reuse, because nobody refers to them any more."""
        blocks: list[Block] = []
        for capture in self.captures:
            capture.retire_dropped_blocks()
            blocks += [block for block in capture.blocks.values() if block.in_pool and block.dead]
        return blocks


_numbers = itertools.count(1)
_pools: weakref.WeakValueDictionary[PoolHandle, Pool] = weakref.WeakValueDictionary()


def new_handle() -> PoolHandle:
    """A value that `torch.cuda.graph_pool_handle()` has not returned before in this process."""
    return (0, next(_numbers))


def pool_for(handle: PoolHandle) -> Pool:
    """The pool of a handle, created if there is none; it lasts as long as a graph that uses it."""
    pool = _pools.get(handle)
    if pool is None:
        pool = _pools[handle] = Pool(handle)
    return pool
