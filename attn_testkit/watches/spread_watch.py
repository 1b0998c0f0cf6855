"""A KV pool that is mostly unused: only the slots of a schedule are filled and checked, wherever they are.

The rest is never touched. Untouched host memory is never allocated, and a device has enough memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..contract import KVPool
from ..contract.row_format import ALL_NAN
from ..steps.kv_groups import slot_map
from ..steps.schedule import Schedule
from .packing import Bytes
from .past_modes import past_modes
from .pool_rows import BITS, PoolRows
from .uploads import upload

_Ints = npt.NDArray[np.int64]


_TILE = 256
"""Number of unowned slots before and after those of a schedule: the size of a tile of keys."""


def slots_around(places: _Ints, slots: int, page_size: int) -> _Ints:
    """Slots [n], ascending, of the pages next to those of ``places``, as far as a tile of keys reaches, in a pool of
    ``slots`` slots.
    """
    pages, reach = set((places[::page_size] // page_size).tolist()), -(-_TILE // page_size)
    near = {page + step for page in pages for step in range(-reach, reach + 1)}
    kept = np.array(sorted(page for page in near - pages if 0 < page < slots // page_size), np.int64)
    return (kept[:, None] * page_size + np.arange(page_size)).reshape(-1)


class SpreadWatch:
    """A watch with the interface of a ``PoolWatch``; slots are those of the schedule."""

    def __init__(self, pool: KVPool, schedule: Schedule) -> None:
        first, size = pool.layers[0], pool.dtype.itemsize
        self._shape = len(pool.layers), first.head_layout.pool_rows
        self._apart = pool.spec.width_apart(first)
        self._row = first.tp_k_head_num, pool.spec.row_width(first) + self._apart
        self.bits = BITS[size]
        """Integer dtype of an element's bits."""
        self._pool, self._device, self._dtype = PoolRows.of(pool), pool.device, pool.dtype
        self._slots, self._page_size, self._places = pool.num_slots, pool.page_size, slot_map(schedule, 0)
        self._on_device = upload(torch.from_numpy(self._places), self._device)
        """Place of each slot of the schedule, [slots]."""
        self._around = upload(
            torch.from_numpy(slots_around(self._places, pool.num_slots, pool.page_size)), self._device
        )
        """Pool slots next to those of the schedule, [n]: unowned, and filled with NaN."""
        self._beside = self._take(self._around)
        """Expected contents of these."""
        self._before = self._take(self._on_device)
        """Expected contents of the slots, the bytes of [L, 2 or 1, slots, Hk, Dqk]."""
        self.clear()

    def _take(self, slots: torch.Tensor) -> torch.Tensor:
        """Copy the bytes of [L, 2 or 1, n, Hk, Dqk] of ``slots`` [n]. Scales that are elsewhere follow their row."""
        found = self._pool.take(slots)
        if not self._apart:
            return found
        parts, (heads, row) = found.view(math.prod(self._shape), -1), self._row
        inside = len(slots) * heads * (row - self._apart)
        pair = parts[:, :inside].reshape(-1, row - self._apart), parts[:, inside:].reshape(-1, self._apart)
        return torch.cat(pair, -1).view(-1)

    def _store(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows``, as ``_take`` returns them, in ``slots`` [n]."""
        if self._apart:
            each = rows.view(math.prod(self._shape), -1, self._row[1])
            pair = each[..., : -self._apart].flatten(1), each[..., -self._apart :].flatten(1)
            rows = torch.cat(pair, -1).view(-1)
        self._pool.put(slots, rows)

    def _by_slot(self, rows: torch.Tensor) -> torch.Tensor:
        """View the bytes of all slots as [L * 2 or L, slots, bytes]."""
        return rows.view(math.prod(self._shape), len(self._places), -1)

    def _of_slots(self, rows: torch.Tensor) -> torch.Tensor:
        """View the bytes of the neighboring slots in the same way."""
        return rows.view(math.prod(self._shape), len(self._around), -1)

    def _put(self) -> None:
        self._store(self._on_device, self._before)
        self._store(self._around, self._beside)

    def fill(self, name: object, held: Callable[[], tuple[_Ints, Bytes]], unowned: float) -> None:
        """Do the work of ``PoolWatch.fill`` for the slots of the schedule."""
        slots, rows = held()
        sent = upload(torch.from_numpy(slots), self._device), upload(torch.from_numpy(rows.reshape(-1)), self._device)
        with past_modes():
            self._fill(unowned)
            if len(slots):
                self._by_slot(self._before)[:, sent[0]] = sent[1].view(math.prod(self._shape), len(slots), -1)
            self._put()

    def _fill(self, value: float) -> None:
        for rows in (self._before, self._beside):
            if self._dtype.itemsize == 1:
                # Not every device can fill FP8.
                rows.fill_(ALL_NAN if math.isnan(value) else 0)
            else:
                rows.view(self._dtype).fill_(value)

    def clear(self) -> None:
        """Do the work of ``PoolWatch.clear``."""
        self._fill(math.nan)
        self._put()
        self.clear_page_0()

    def clear_page_0(self) -> None:
        """Do the work of ``PoolWatch.clear_page_0``."""
        zeros = torch.zeros(self._pool.bytes_of(self._page_size), dtype=torch.uint8)
        self._pool.put(upload(torch.arange(self._page_size), self._device), upload(zeros, self._device))

    def _changed(self) -> torch.Tensor:
        """Flags [slots] uint8: not 0 if a slot has wrong contents."""
        now = self._by_slot(self._take(self._on_device))
        return torch.ne(now, self._by_slot(self._before)).any(2).any(0).view(torch.uint8)

    def written_since_clear(self) -> _Ints:
        """Do the work of ``PoolWatch.written_since_clear``."""
        slots: _Ints = np.flatnonzero(self._changed().cpu().numpy())
        return slots[slots >= self._page_size]

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Do the work of ``PoolWatch.look``: the wanted rows are those of ``due``."""
        rows = self._take(self._on_device[due])
        beside = self._of_slots(self._take(self._around)), self._of_slots(self._beside)
        differs = torch.ne(*beside).any(2).any(0).view(torch.uint8)
        return (self._changed(), slots), (rows, self._pool.bytes_of(count)), (differs, len(self._around))

    def written(self, due: _Ints, found: Sequence[Bytes]) -> tuple[_Ints, Bytes, tuple[int, ...]]:
        """Do the work of ``PoolWatch.written``."""
        changed: _Ints = np.flatnonzero(found[0])
        rows = self._take(self._on_device[upload(torch.from_numpy(changed), self._device)]).cpu().numpy()
        return changed, rows, (*self._shape, len(changed), *self._row)

    def outside(self, found: Sequence[Bytes]) -> _Ints:
        """First bytes of slots next to the schedule's that changed, in K of a layer; memory further away is not
        checked."""
        places = slots_around(self._places, self._slots, self._page_size)
        row = math.prod(self._row) * self._dtype.itemsize
        return places[np.flatnonzero(found[2])] * row if len(found) > 2 else np.empty(0, np.int64)
