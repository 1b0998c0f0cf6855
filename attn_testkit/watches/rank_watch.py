"""The pools of ranks, watched as one: slots are numbered as in the schedule, on whichever rank they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..contract import KVGroup
from ..steps.ranks import RankPlaces, places_on_ranks
from ..steps.schedule import Schedule, Step
from .joined_watch import JoinedWatch
from .packing import Bytes
from .pool_watch import PoolWatch

_Ints = npt.NDArray[np.int64]
_MOST_STRAYS = 16
"""Number of stray rows whose contents are reported."""


class RankWatch(JoinedWatch):
    """One ``PoolWatch`` per rank, with the interface of one for a single rank, and a list of stray writes."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        """Watch the pools of ranks: one group per rank, each with all layers."""
        super().__init__([PoolWatch(group.kv_pool) for group in groups])
        self._page_size = groups[0].kv_pool.page_size
        self._places: RankPlaces | None = None
        """Places of the keys of the step that is loaded."""
        self._strays: tuple[_Ints, Bytes, tuple[int, ...]] | None = None

    def fill(
        self, name: tuple[Schedule, Step, str | None], held: Callable[[], tuple[_Ints, Bytes]], unowned: float
    ) -> None:
        """Do the work of ``PoolWatch.fill``; ``held`` has slots of the schedule, of which each rank gets its own."""
        places = self._places = places_on_ranks(name[0], name[1])
        made: list[tuple[_Ints, Bytes]] = []

        def of_rank(rank: int) -> tuple[_Ints, Bytes]:
            if not made:
                made.append(held())
            slots, rows = made[0]
            mine = places.rank[slots] == rank
            parts = rows.reshape(self._shape(len(slots)))[:, mine]
            return places.slot[slots[mine]], np.ascontiguousarray(parts).reshape(-1)

        for rank, watch in enumerate(self._watches):
            watch.fill(name, lambda rank=rank: of_rank(rank), unowned)  # type: ignore[misc]

    @property
    def _parts(self) -> tuple[int, int]:
        """L, and 2 for keys and values or 1 for latent rows."""
        return self._watches[0].parts

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Do the work of ``PoolWatch.look`` for each rank, without rows: ``written`` copies the rows that changed."""
        return tuple(part for watch in self._watches for part in watch.look(slots, due[:0], 0))

    def written(self, due: _Ints, found: Sequence[Bytes]) -> tuple[_Ints, Bytes, tuple[int, ...]]:
        """Do the work of ``PoolWatch.written``: slots of the schedule whose own place, on their own rank, changed.

        Slots of a rank that belong to no key there, and that changed, are ``strays``. Page 0 of each rank is left out:
        padding and tokens of other ranks may be stored there.
        """
        assert self._places is not None
        places, slots, rows, stray_at, stray_rows = self._places, [], [], [], []
        for rank, (watch, mine) in enumerate(self._by_pool(found)):
            changed = np.flatnonzero(watch.changed(mine[0]))
            changed = changed[changed >= self._page_size]
            owners, held = places.owners(rank)[changed], self._rows(watch, changed)
            slots.append(owners[owners >= 0])
            rows.append(held[:, owners >= 0])
            strays = np.flatnonzero(owners < 0)
            stray_at.append(np.stack([np.full(len(strays), rank), changed[strays]], 1))
            stray_rows.append(held[:, strays])
        every, where = np.concatenate(slots), np.concatenate(stray_at)
        order = np.argsort(every)
        shape = (*self._parts, len(every), *self._watches[0].row)
        few = np.ascontiguousarray(np.concatenate(stray_rows, 1)[:, :_MOST_STRAYS]).reshape(-1)
        self._strays = where, few, (*self._parts, min(len(where), _MOST_STRAYS), *self._watches[0].row)
        return every[order], np.ascontiguousarray(np.concatenate(rows, 1)[:, order]).reshape(-1), shape

    def strays(self) -> tuple[_Ints, Bytes, tuple[int, ...]]:
        """Stray writes of the last step: rank and slot in its pool [n, 2], and the bits of the first few of these rows
        with their shape [L, 2 or 1, at most 16, Hk, Dqk]. Call it after ``written``.
        """
        assert self._strays is not None
        return self._strays

    def _rows(self, watch: PoolWatch, slots: _Ints) -> Bytes:
        """Contents of slots of a rank's pool, [L * (2 or 1), n, bytes]."""
        return watch.rows_of(slots).reshape(self._shape(len(slots)))

    def _shape(self, count: int) -> tuple[int, int, int]:
        """Shape of ``count`` rows: L * (2 or 1), rows, bytes of a row."""
        return math.prod(self._parts), count, math.prod(self._watches[0].row) * self.bits.itemsize
