"""The pools of ranks that each have all keys, watched as one: slots are numbered as in the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..contract import KVGroup
from ..steps.kv_groups import slot_map
from ..steps.schedule import Schedule, Step
from .joined_watch import JoinedWatch
from .packing import Bytes
from .pool_watch import PoolWatch

_Ints = npt.NDArray[np.int64]
_MOST_DIFFERENT = 16
"""Number of different rows whose contents are reported."""


class ReplicaWatch(JoinedWatch):
    """One ``PoolWatch`` per rank. It has the interface of one for rank 0, and a list of rows of others that differ."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        """Watch the pools of ranks: one group per rank, each with all layers."""
        super().__init__([PoolWatch(group.kv_pool) for group in groups])
        self._page_size = groups[0].kv_pool.page_size
        self._mapped: Schedule | None = None
        """The schedule whose maps are cached."""
        self._maps: list[_Ints] = []
        """Maps from slots of the schedule to slots of a rank's pool."""
        self._different: tuple[_Ints, Bytes, tuple[int, ...]] | None = None

    def fill(
        self, name: tuple[Schedule, Step, str | None], held: Callable[[], tuple[_Ints, Bytes]], unowned: float
    ) -> None:
        """Do the work of ``PoolWatch.fill`` for each rank; ``held`` has slots of the schedule."""
        if name[0] is not self._mapped:
            self._mapped = name[0]
            self._maps = [slot_map(name[0], rank) for rank in range(len(self._watches))]
        made: list[tuple[_Ints, Bytes]] = []

        def of_rank(rank: int) -> tuple[_Ints, Bytes]:
            if not made:
                made.append(held())
            slots, rows = made[0]
            return self._maps[rank][slots], rows

        for rank, watch in enumerate(self._watches):
            watch.fill(name, lambda rank=rank: of_rank(rank), unowned)  # type: ignore[misc]

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Do the work of ``PoolWatch.look`` for each rank, without rows: ``written`` copies the rows that changed."""
        return tuple(part for watch in self._watches for part in watch.look(slots, due[:0], 0))

    def written(self, due: _Ints, found: Sequence[Bytes]) -> tuple[_Ints, Bytes, tuple[int, ...]]:
        """Do the work of ``PoolWatch.written`` for rank 0, after page 0.

        Rows of other ranks that hold other bits than those of rank 0 are ``different``.
        """
        changed = [
            set(np.argsort(of_rank)[np.flatnonzero(watch.changed(mine[0]))].tolist())
            for of_rank, (watch, mine) in zip(self._maps, self._by_pool(found), strict=True)
        ]
        # Without np.unique, as in ``ServerHarness.load``.
        every = np.array([slot for slot in sorted(set().union(*changed)) if slot >= self._page_size], dtype=np.int64)
        rows = [self._rows(rank, every) for rank in range(len(self._watches))]
        where = [
            (rank, at)
            for rank in range(1, len(rows))
            for at in np.flatnonzero((rows[rank] != rows[0]).any(axis=(0, 2))).tolist()
        ]
        few = where[:_MOST_DIFFERENT]
        held = np.stack([rows[rank][:, at] for rank, at in few], 1) if few else np.empty(0, np.uint8)
        parts, row = self._watches[0].parts, self._watches[0].row
        self._different = (
            np.array([(rank, int(every[at])) for rank, at in where], dtype=np.int64).reshape(-1, 2),
            np.ascontiguousarray(held).reshape(-1),
            (*parts, len(few), *row),
        )
        of_first = np.array([slot in changed[0] for slot in every.tolist()], dtype=np.bool_)
        mine = np.ascontiguousarray(rows[0][:, of_first]).reshape(-1)
        return every[of_first], mine, (*parts, int(of_first.sum()), *row)

    def _rows(self, rank: int, slots: _Ints) -> Bytes:
        """Contents of slots of the schedule in the pool of a rank, [L * (2 or 1), n, bytes]."""
        watch = self._watches[rank]
        size = math.prod(watch.row) * self.bits.itemsize
        return watch.rows_of(self._maps[rank][slots]).reshape(math.prod(watch.parts), len(slots), size)

    def different(self) -> tuple[_Ints, Bytes, tuple[int, ...]]:
        """Rank and slot of the schedule of rows that differ from those of rank 0 after the last step [n, 2], and the
        bits of the first few with their shape [L, 2 or 1, at most 16, Hk, Dqk]. Call it after ``written``.
        """
        assert self._different is not None
        return self._different
