"""``JoinedWatch``: the parent of the watches of KV groups and of ranks, which watch several pools as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .packing import Bytes
from .pool_watch import PoolWatch

_Ints = npt.NDArray[np.int64]


class JoinedWatch:
    """Watches of several pools, with the interface of one ``PoolWatch``."""

    def __init__(self, watches: Sequence[PoolWatch]) -> None:
        self._watches = watches
        self.bits = watches[0].bits
        """Integer dtype of an element's bits."""

    def clear(self) -> None:
        """Do the work of ``PoolWatch.clear``."""
        for watch in self._watches:
            watch.clear()

    def clear_page_0(self) -> None:
        """Do the work of ``PoolWatch.clear_page_0``."""
        for watch in self._watches:
            watch.clear_page_0()

    def written_since_clear(self) -> _Ints:
        """Do the work of ``PoolWatch.written_since_clear``: slots of any pool, [n] ascending."""
        every = [watch.written_since_clear().tolist() for watch in self._watches]
        return np.array(sorted({slot for slots in every for slot in slots}), dtype=np.int64)

    def _by_pool(self, found: Sequence[Bytes]) -> list[tuple[PoolWatch, Sequence[Bytes]]]:
        """Watches, each with its part of the results of ``look``."""
        each = len(found) // len(self._watches)
        return [(watch, found[index * each : (index + 1) * each]) for index, watch in enumerate(self._watches)]

    def outside(self, found: Sequence[Bytes]) -> _Ints:
        """Do the work of ``PoolWatch.outside`` for all pools."""
        return np.concatenate([watch.outside(mine) for watch, mine in self._by_pool(found)])
