"""The KV pool and its contents before the step: they are compared on the device, and only changes are copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..cases.head_shapes import HeadMap
from ..contract import KVPool
from .packing import Bytes
from .past_modes import past_modes
from .pool_rows import BITS, Between, PoolRows
from .uploads import upload


class PoolWatch:
    """A watch that fills the pool of one instance before a step, and reports afterwards which slots changed."""

    def __init__(self, pool: KVPool, maps: Sequence[HeadMap] = ()) -> None:
        """Watch a pool. ``maps``: one per layer, if they differ in heads. Rows are then in the shape of the case."""
        first, size = pool.layers[0], pool.dtype.itemsize
        self._maps = maps
        self.parts = len(pool.layers), first.head_layout.pool_rows
        """L, and 2 for keys and values or 1 for latent rows."""
        inside, self._apart = pool.spec.row_width(first), pool.spec.width_apart(first)
        self.row = maps[0].case[1:] if maps else (first.tp_k_head_num, inside + self._apart)
        """Heads and elements of a row: Hk, Dqk."""
        widths = pool.spec.part_widths(first)
        self._narrow = widths[-1] if len(set(widths)) > 1 else 0
        """Width of a value, if keys are wider; rows are then as wide as keys, with zeros after values."""
        self.bits = BITS[size]
        """Integer dtype of an element's bits."""
        self._now = PoolRows.of(pool)
        self._before = self._now.twin()
        self._between = Between(pool)
        self._slots, self._page_size, self._device = pool.num_slots, pool.page_size, pool.device
        self._held: object = None

    def fill(self, name: object, held: Callable[[], tuple[npt.NDArray[np.int64], Bytes]], unowned: float) -> None:
        """Fill some slots with rows, and all other memory with ``unowned``, a finite number or NaN.

        ``held`` gives slots [n] and the bytes of [L, 2 or 1, n, Hk, Dqk]. ``name``: equal for equal contents, of which
        the last ones are on the device already.
        """
        if name != self._held:
            self._held = None
            slots, rows = held()
            first, rows = len(slots) * slots.itemsize, self._parts(rows, len(slots))
            sent = upload(torch.from_numpy(np.concatenate([slots.view(np.uint8), rows.reshape(-1)])), self._device)
            with past_modes():
                self._before.fill(unowned)
                if len(slots):
                    self._before.put(sent[:first].view(torch.int64), sent[first:])
            self._held = name
        with past_modes():
            self._now.copy_(self._before)

    def poison(self) -> None:
        """Fill everything with NaN."""
        self._now.fill(math.nan)

    def clear(self) -> None:
        """Prepare memory as a server has it at capture: page 0 zeros, NaN everywhere else."""
        self._held = None
        self._before.fill(math.nan)
        self._now.copy_(self._before)
        self.clear_page_0()

    def clear_page_0(self) -> None:
        """Fill page 0 with zeros."""
        zeros = torch.zeros(self._now.bytes_of(self._page_size), dtype=torch.uint8)
        self._now.put(upload(torch.arange(self._page_size), self._device), upload(zeros, self._device))

    def written_since_clear(self) -> npt.NDArray[np.int64]:
        """Slots outside page 0 that were written since ``clear``, [n] ascending."""
        differs = self._now.differs(self._before, self._slots).cpu().view(torch.uint8).view(self._slots, -1).any(1)
        slots: npt.NDArray[np.int64] = np.flatnonzero(differs.numpy())
        return slots[slots >= self._page_size]

    def store(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows`` [L, 2 or 1, n, Hk, Dqk], or their bytes, in ``slots`` [n] int64. Both on the host."""
        raw = self._parts(rows.contiguous().view(-1).view(torch.uint8).numpy(), len(slots))
        self._now.put(upload(slots, self._device), upload(torch.from_numpy(raw), self._device))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows from slots to slots, [n] int64 each, on the host; all are read before one is written."""
        self._now.put(upload(target, self._device), self._now.take(upload(source, self._device)))

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Compare the first ``slots`` on the device, without a wait. ``due`` [count]: slots whose rows are requested.
        Returns bytes and their number: per slot, not all 0 if it changed; the rows; and, if there is memory between
        slots, a flag and the place of a change there.
        """
        changed, rows = self._now.differs(self._before, slots), self._now.take(due)
        size = self._now.bytes_of(count)
        outside = [(found.view(torch.uint8), 16) for found in self._between.differs(self._now, self._before)]
        return (changed.view(torch.uint8), slots * self._now.mark), (rows, size), *outside

    def written(
        self, due: npt.NDArray[np.int64], found: Sequence[Bytes]
    ) -> tuple[npt.NDArray[np.int64], Bytes, tuple[int, ...]]:
        """Changed slots [n], ascending, and their contents as ``bits`` [L, 2 or 1, n, Hk, Dqk], as bytes and a shape.

        ``found``: results of ``look`` for ``due``, on the host. Further slots that changed are copied now.
        """
        changed, rows, *_ = found
        differs = self.changed(changed)
        as_due, count = differs[due], int(differs.sum())
        shape = (*self.parts, count, *self.row)
        if as_due.sum() < count:
            slots = np.flatnonzero(differs)
            return slots, self.rows_of(slots), shape
        held = self.whole(rows, len(due)).reshape(math.prod(self.parts), len(due), -1)
        return due[as_due], (held if count == len(due) else held[:, as_due]).reshape(-1), shape

    def changed(self, marks: Bytes) -> npt.NDArray[np.bool_]:
        """True for each slot that changed. ``marks``: the first result of ``look``, on the host."""
        differs: npt.NDArray[np.bool_] = marks.view(f"u{self._now.mark}") != 0
        return differs

    def rows_of(self, slots: npt.NDArray[np.int64]) -> Bytes:
        """Copy the present contents of slots [n] to the host: the bytes of [L, 2 or 1, n, Hk, Dqk]."""
        raw: Bytes = self._now.take(upload(torch.from_numpy(slots), self._device)).cpu().numpy()
        return self.whole(raw, len(slots))

    def _parts(self, whole: Bytes, count: int) -> Bytes:
        """Convert rows of ``count`` slots from the case's shape to the layers' shapes, view by view of memory."""
        if self._apart and count:
            raw = whole.reshape(math.prod(self.parts), -1, self.row[1])
            pair = raw[..., : -self._apart], raw[..., -self._apart :]
            return np.concatenate([part[index].reshape(-1) for index in range(len(raw)) for part in pair])
        if not (self._maps or self._narrow) or not count:
            return whole
        rows = torch.from_numpy(whole).view(self.bits).view(*self.parts, count, *self.row)
        if self._narrow:
            parts = [
                part for layer in rows for part in (layer[0].reshape(-1), layer[1, ..., : self._narrow].reshape(-1))
            ]
        else:
            parts = [each.kv_part(rows[layer]).reshape(-1) for layer, each in enumerate(self._maps)]
        return torch.cat(parts).view(torch.uint8).numpy()

    def whole(self, parts: Bytes, count: int) -> Bytes:
        """Convert rows of ``count`` slots from the layers' shapes to the bytes of [L, 2 or 1, count, Hk, Dqk]."""
        if self._apart and count:
            raw, width = parts.reshape(math.prod(self.parts), -1), self.row[1] - self._apart
            inside = raw.shape[1] // self.row[1] * width
            pair = raw[:, :inside].reshape(len(raw), -1, width), raw[:, inside:].reshape(len(raw), -1, self._apart)
            return np.concatenate(pair, -1).reshape(-1)
        if self._narrow and count:
            return self._widened(parts, count)
        if not self._maps or not count:
            return parts
        layers, pairs = [], self.parts[1]
        sizes = [pairs * count * each.layer.num_kv_heads * each.layer.head_dim for each in self._maps]
        # A copy, because the bytes may not be aligned.
        rows = torch.split(torch.from_numpy(parts.copy()).view(self.bits), sizes)
        for each, own in zip(self._maps, rows, strict=True):
            layers.append(each.kv_whole(own.view(pairs, count, *each.layer[1:])))
        return torch.stack(layers).view(-1).view(torch.uint8).numpy()

    def _widened(self, parts: Bytes, count: int) -> Bytes:
        """Rows of ``count`` slots, each layer's K before its V, as [L, 2, count, Hk, Dqk], with zeros after values."""
        heads, width = self.row
        rows = torch.from_numpy(parts.copy()).view(self.bits).view(self.parts[0], -1)
        keys, values = torch.split(rows, [count * heads * width, count * heads * self._narrow], 1)
        values = torch.nn.functional.pad(values.reshape(-1, self._narrow), (0, width - self._narrow))
        both = torch.stack([keys.reshape(self.parts[0], -1), values.view(self.parts[0], -1)], 1)
        return both.view(-1).view(torch.uint8).numpy()

    def outside(self, found: Sequence[Bytes]) -> npt.NDArray[np.int64]:
        """Bytes [n] of memory between slots that changed, one per block.

        ``found``: results of ``look``, on the host.
        """
        pairs = np.concatenate([np.empty(0, np.int64), *(each.view(np.int64) for each in found[2:])]).reshape(-1, 2)
        places: npt.NDArray[np.int64] = pairs[pairs[:, 0] > 0, 1] * self.bits.itemsize
        return places
