"""The KV pool and what it held before the step: it is compared on the device, and only what changed is copied."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.contract import KVPool

from .packing import Bytes
from .uploads import upload

__all__ = ["PoolWatch"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Size of an element -> integers."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The same from the widest: the fewer elements, the faster they are compared."""


class PoolWatch:
    """Fills the pool of one instance before a step, and says afterwards which slots changed."""

    def __init__(self, pool: KVPool) -> None:
        storage, size = pool.storage, pool.dtype.itemsize
        self.layers, self.parts, self._slots, *self._row = storage.shape
        self.bits = _BITS[size]
        """Integers of an element's bits."""
        row = math.prod(self._row) * size
        self._word, self._mark = _widest(row), _widest(row // _widest(row))
        self._now, self._before = storage, torch.empty_like(storage)
        self._device = pool.device
        # FP8 has neither fill nor indexing everywhere.
        self._to_fill = self._before.view(torch.uint8) if size == 1 else self._before
        self._held: object = None
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, name: object, held: Callable[[], tuple[npt.NDArray[np.int64], Bytes]], unowned: float) -> None:
        """Have some slots hold rows, and all others ``unowned``, a finite number or NaN.

        ``held`` gives slots [n] and the bytes of [L, 2 or 1, n, Hk, Dqk]. ``name``: equal for equal contents; the last
        ones are on the device already.
        """
        if name != self._held:
            self._held = None
            self._to_fill.fill_(unowned if self.bits is not torch.uint8 else 0x7F if math.isnan(unowned) else 0)
            slots, rows = held()
            if len(slots):
                self._put(slots, rows)
            self._held = name
        self._now.copy_(self._before)

    def _put(self, slots: npt.NDArray[np.int64], rows: Bytes) -> None:
        first = len(slots) * slots.itemsize
        sent = upload(torch.from_numpy(np.concatenate([slots.view(np.uint8), rows.reshape(-1)])), self._device)
        on_device = sent[first:].view(_WORDS[self._word]).view(self.layers, self.parts, len(slots), -1)
        _, before = self._words(self._slots)
        before.index_copy_(2, sent[:first].view(torch.int64), on_device)

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Compare the first ``slots`` on the device, without a wait. ``due`` [count]: those whose rows are wanted.

        Bytes, and how many: of each slot, not all 0 where it changed; and the rows.
        """
        now, before = self._words(slots)
        # As wide as a row of booleans allows.
        changed = torch.ne(now, before).view(_WORDS[self._mark]).amax((0, 1, 3))
        rows = now.index_select(2, due)
        size = self.layers * self.parts * count * math.prod(self._row) * self.bits.itemsize
        return (changed.view(torch.uint8), slots * self._mark), (rows.view(-1).view(torch.uint8), size)

    def written(
        self, due: npt.NDArray[np.int64], changed: Bytes, rows: Bytes
    ) -> tuple[npt.NDArray[np.int64], Bytes, tuple[int, ...]]:
        """Slots that changed [n] ascending, and bytes and shape of what they hold, [L, 2 or 1, n, Hk, Dqk] as ``bits``.

        ``changed``, ``rows``: what ``look`` gave for ``due``, on the host. If others changed too, they are copied now.
        """
        differs: npt.NDArray[np.bool_] = changed.view(f"u{self._mark}") != 0
        as_due, count = differs[due], int(differs.sum())
        shape = (self.layers, self.parts, count, *self._row)
        if as_due.sum() < count:
            slots = np.flatnonzero(differs)
            now, _ = self._words(self._slots)
            every = now.index_select(2, upload(torch.from_numpy(slots), self._device)).cpu()
            return slots, every.view(-1).view(torch.uint8).numpy(), shape
        held = rows.reshape(self.layers * self.parts, len(due), -1)
        return due[as_due], (held if count == len(due) else held[:, as_due]).reshape(-1), shape

    def _words(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, 2 or 1, slots, n] of the pool now and before the step, as wide integers."""
        if slots not in self._views:
            dtype = _WORDS[self._word]
            now, before = (pool[:, :, :slots].flatten(3).view(dtype) for pool in (self._now, self._before))
            self._views[slots] = now, before
        return self._views[slots]


def _widest(size: int) -> int:
    """Bytes of the widest integers that ``size`` bytes are a whole number of."""
    return next(width for width in _WORDS if size % width == 0)
