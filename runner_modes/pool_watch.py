"""The KV pool and what it held before the step: it is compared on the device, and only what changed is copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.contract import KVPool

from .packing import Bytes
from .pool_rows import BITS, Between, PoolRows
from .uploads import upload

__all__ = ["PoolWatch"]


class PoolWatch:
    """Fills the pool of one instance before a step, and says afterwards which slots changed."""

    def __init__(self, pool: KVPool) -> None:
        first, size = pool.layers[0], pool.dtype.itemsize
        self._shape = len(pool.layers), 1 if pool.is_mla else 2
        self._row = first.tp_k_head_num, first.head_dim
        self.bits = BITS[size]
        """Integers of an element's bits."""
        self._now = PoolRows.of(pool)
        self._before = self._now.twin()
        self._between = Between(pool)
        self._slots, self._page_size, self._device = pool.num_slots, pool.page_size, pool.device
        self._held: object = None

    def fill(self, name: object, held: Callable[[], tuple[npt.NDArray[np.int64], Bytes]], unowned: float) -> None:
        """Have some slots hold rows, and all other memory ``unowned``, a finite number or NaN.

        ``held`` gives slots [n] and the bytes of [L, 2 or 1, n, Hk, Dqk]. ``name``: equal for equal contents; the last
        ones are on the device already.
        """
        if name != self._held:
            self._held = None
            self._before.fill(unowned)
            slots, rows = held()
            if len(slots):
                first = len(slots) * slots.itemsize
                sent = upload(torch.from_numpy(np.concatenate([slots.view(np.uint8), rows.reshape(-1)])), self._device)
                self._before.put(sent[:first].view(torch.int64), sent[first:])
            self._held = name
        self._now.copy_(self._before)

    def poison(self) -> None:
        """NaN everywhere."""
        self._now.fill(math.nan)

    def clear(self) -> None:
        """The memory as a server has it when it captures: page 0 zeros, NaN everywhere else."""
        self._held = None
        self._before.fill(math.nan)
        self._now.copy_(self._before)
        zeros = torch.zeros(math.prod(self._shape) * self._page_size * self._now.row_bytes, dtype=torch.uint8)
        self.store(torch.arange(self._page_size), zeros)

    def written_since_clear(self) -> npt.NDArray[np.int64]:
        """Slots outside page 0 that were written since ``clear``, [n] ascending."""
        differs = self._now.differs(self._before, self._slots).cpu().view(torch.uint8).view(self._slots, -1).any(1)
        slots: npt.NDArray[np.int64] = np.flatnonzero(differs.numpy())
        return slots[slots >= self._page_size]

    def store(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Have ``slots`` [n] int64 hold ``rows`` [L, 2 or 1, n, Hk, Dqk], or their bytes. Both on the host."""
        raw = rows.contiguous().view(-1).view(torch.uint8)
        self._now.put(upload(slots, self._device), upload(raw, self._device))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows from slots to slots, [n] int64 each, on the host; all are read before one is written."""
        self._now.put(upload(target, self._device), self._now.take(upload(source, self._device)))

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Compare the first ``slots`` on the device, without a wait. ``due`` [count]: those whose rows are wanted.

        Bytes, and how many: of each slot, not all 0 where it changed; the rows; and of memory that is no slot's, where
        there is any, whether and where it changed.
        """
        changed, rows = self._now.differs(self._before, slots), self._now.take(due)
        size = math.prod(self._shape) * count * self._now.row_bytes
        outside = [(found.view(torch.uint8), 16) for found in self._between.differs(self._now, self._before)]
        return (changed.view(torch.uint8), slots * self._now.mark), (rows, size), *outside

    def written(
        self, due: npt.NDArray[np.int64], found: Sequence[Bytes]
    ) -> tuple[npt.NDArray[np.int64], Bytes, tuple[int, ...]]:
        """Slots that changed [n] ascending, and bytes and shape of what they hold, [L, 2 or 1, n, Hk, Dqk] as ``bits``.

        ``found``: what ``look`` gave for ``due``, on the host. If others changed too, they are copied now.
        """
        changed, rows, *_ = found
        differs: npt.NDArray[np.bool_] = changed.view(f"u{self._now.mark}") != 0
        as_due, count = differs[due], int(differs.sum())
        shape = (*self._shape, count, *self._row)
        if as_due.sum() < count:
            slots = np.flatnonzero(differs)
            every = self._now.take(upload(torch.from_numpy(slots), self._device)).cpu()
            return slots, every.numpy(), shape
        held = rows.reshape(math.prod(self._shape), len(due), -1)
        return due[as_due], (held if count == len(due) else held[:, as_due]).reshape(-1), shape

    def outside(self, found: Sequence[Bytes]) -> npt.NDArray[np.int64]:
        """[n]: bytes of memory that is no slot's and changed, one for each piece of it that did.

        ``found``: what ``look`` gave, on the host.
        """
        pairs = np.concatenate([np.empty(0, np.int64), *(each.view(np.int64) for each in found[2:])]).reshape(-1, 2)
        places: npt.NDArray[np.int64] = pairs[pairs[:, 0] > 0, 1] * self.bits.itemsize
        return places
