"""The memory of a KV pool, found by slot whatever its layout.

Views of K and V become tables: layers and K or V, slots, words of a row, each with as many dimensions as strides need.
If the layers of a pool have equal strides, as in every named layout, one table covers all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..contract import KVPool
from ..contract.kv_layouts import between, place_of, slot_dims
from ..contract.row_format import ALL_NAN

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Size of an element -> integer dtype."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer dtypes from the widest: wide elements are compared faster."""

_Dims = tuple[tuple[int, int], ...]
"""Sizes and strides, the outermost first."""


@dataclass(frozen=True)
class _Table:
    """Places of each slot of some layers, of K or V, or of separate scales."""

    piece: int
    """Index of the block of memory."""
    word: int
    """Bytes of the words in which the table is read; strides count these words."""
    outer: _Dims
    """Dimensions of layers, and of K and V."""
    slots: _Dims
    row: _Dims
    first: int
    """Index of the first word."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all its layers, K and V."""
        return math.prod(size for size, _ in (*self.outer, *self.row)) * self.word

    def view(self, pieces: Sequence[torch.Tensor], slots: int) -> torch.Tensor:
        """View words [*outer, *slots, *row], limited in the outermost dimension of slots to what ``slots`` needs."""
        (count, stride), *inner = self.slots
        needed = -(-slots // math.prod(size for size, _ in inner))
        dims = (*self.outer, (min(count, needed), stride), *inner, *self.row)
        memory = pieces[self.piece].view(_WORDS[self.word])
        return memory.as_strided([size for size, _ in dims], [step for _, step in dims], self.first)

    def take(self, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Copy the rows [*outer, n, *row] of ``slots`` [n] int64 on the device."""
        if len(self.slots) == 1:
            return view.index_select(len(self.outer), slots)
        return view[self._at(slots)]

    def put(self, view: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows`` [n]: the bytes of [*outer, n, *row]."""
        sizes = [size for size, _ in self.outer], [size for size, _ in self.row]
        words = rows.view(_WORDS[self.word]).view(*sizes[0], len(slots), *sizes[1])
        if len(self.slots) == 1:
            view.index_copy_(len(self.outer), slots, words)
        else:
            view[self._at(slots)] = words

    def _at(self, slots: torch.Tensor) -> tuple[slice | torch.Tensor, ...]:
        return (*[slice(None)] * len(self.outer), *place_of(slots, [size for size, _ in self.slots]))

    def differs(self, now: torch.Tensor, before: torch.Tensor, mark: int) -> torch.Tensor:
        """Integers [slots] of ``mark`` bytes, not 0 if a row of a slot differs. Both arguments are from ``view``."""
        first, last = len(self.outer), len(self.outer) + len(self.slots)
        found = torch.ne(now, before).view(_WORDS[mark])
        return found.amax((*range(first), *range(last, found.dim())))


class PoolRows:
    """One copy of a pool's memory."""

    def __init__(
        self, pieces: Iterable[torch.Tensor], tables: Sequence[_Table], slots: int, dtype: torch.dtype
    ) -> None:
        """Wrap the memory ``pieces``, each [n] uint8. ``slots``: number of slots in the pool. ``dtype``: the dtype of
        the pool."""
        self.pieces, self._tables, self._slots, self._dtype = tuple(pieces), tuple(tables), slots, dtype
        one = tables[0]
        flat = len(tables) == 1 and len(one.outer) == len(one.slots) == len(one.row) == 1
        self.mark = _widest(one.row[0][0]) if flat else 1
        """Bytes of the mark of a slot that differs: as wide as a row of booleans allows."""
        self._views: dict[int, list[torch.Tensor]] = {}
        # Not every device can fill FP8.
        self._to_fill = [piece.view(dtype) if dtype.itemsize > 1 else piece for piece in self.pieces]

    @staticmethod
    def of(pool: KVPool) -> PoolRows:
        """The pool's own memory."""
        layers = [layer.every for layer in pool.memory.values()]
        pieces = [memory.view(torch.uint8) for memory, _ in pool.pieces]
        steps = _steps(layers)
        if steps is None:
            tables = [_table(pieces, part, ((1, 0),), pool.num_slots) for parts in layers for part in parts]
        else:
            tables = [
                _table(pieces, layers[0][0], ((len(layers), steps[0]), (len(layers[0]), steps[1])), pool.num_slots)
            ]
        return PoolRows(pieces, tables, pool.num_slots, pool.dtype)

    def bytes_of(self, slots: int) -> int:
        """Bytes of this number of slots in all layers, K and V."""
        return slots * sum(table.slot_bytes for table in self._tables)

    def twin(self) -> PoolRows:
        """Make a copy over other memory, with arbitrary contents."""
        return PoolRows((torch.empty_like(piece) for piece in self.pieces), self._tables, self._slots, self._dtype)

    def fill(self, value: float) -> None:
        """Fill all memory, slots or not, with a finite number or NaN. FP8: NaN or 0."""
        value = value if self._dtype.itemsize > 1 else ALL_NAN if math.isnan(value) else 0
        for piece in self._to_fill:
            piece.fill_(value)

    def copy_(self, other: PoolRows) -> None:
        """Copy all memory from an equal pool."""
        for mine, theirs in zip(self.pieces, other.pieces, strict=True):
            mine.copy_(theirs)

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows in ``slots`` [n] int64: the bytes of [L, 2 or 1, n, Hk, Dqk] as one. Both on the device.

        If layers differ in Hk or Dqk, or scales are separate, the views of ``KVLayer.every`` follow each other.
        """
        parts = torch.split(rows, [len(slots) * table.slot_bytes for table in self._tables])
        for table, view, part in zip(self._tables, self.views(self._slots), parts, strict=True):
            # Behind scales of few bytes the next view may begin between two words.
            table.put(view, slots, part.clone() if part.storage_offset() % table.word else part)

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Copy the bytes of ``slots`` on the device, in the format of ``put``."""
        found = [
            table.take(view, slots).reshape(-1).view(torch.uint8)
            for table, view in zip(self._tables, self.views(self._slots), strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def differs(self, other: PoolRows, slots: int) -> torch.Tensor:
        """Compare the first ``slots`` with those of an equal pool: ``mark`` bytes each, not all 0 if one differs."""
        pairs = zip(self._tables, self.views(slots), other.views(slots), strict=True)
        # Tables of a pool may count slots in different dimensions, and so hold some more than requested.
        found = [table.differs(now, before, self.mark).view(-1)[:slots] for table, now, before in pairs]
        return found[0] if len(found) == 1 else torch.stack(found).amax(0)

    def views(self, slots: int) -> list[torch.Tensor]:
        """Views [*outer, *slots, *row] of each table."""
        if slots not in self._views:
            self._views[slots] = [table.view(self.pieces, slots) for table in self._tables]
        return self._views[slots]


class Between:
    """Memory of a pool that belongs to no slot."""

    def __init__(self, pool: KVPool) -> None:
        self._bits = BITS[pool.dtype.itemsize]
        self._free = {
            index: between(memory, views)
            for index, (memory, views) in enumerate(pool.pieces)
            if sum(view.numel() for view in views) < memory.numel()
        }

    def differs(self, now: PoolRows, before: PoolRows) -> list[torch.Tensor]:
        """Flag and index, [2] int64 per block with such memory: 1 if an element differs, else 0, and the index of one
        that differs."""
        found = []
        for index, free in self._free.items():
            pair = (rows.pieces[index].view(self._bits) for rows in (now, before))
            differs = torch.ne(*pair) & free
            found.append(torch.stack([differs.any().long(), differs.view(torch.uint8).argmax()]))
        return found


def _table(pieces: Sequence[torch.Tensor], view: torch.Tensor, outer: _Dims, slots: int) -> _Table:
    """Make the table of a view. ``outer``: its strides in bytes."""
    size, address = view.dtype.itemsize, view.untyped_storage().data_ptr()
    piece = next(index for index, each in enumerate(pieces) if each.untyped_storage().data_ptr() == address)
    dims = [(count, stride * size) for count, stride in zip(view.shape, view.stride(), strict=True)]
    leading = slot_dims(view, slots)
    row = _merged([*dims[leading:], (size, 1)])
    groups = [_merged(outer), _merged(dims[:leading]), row if row[-1][1] == 1 else [*row, (1, 1)]]
    first = view.storage_offset() * size
    strides = [stride for group in groups for _, stride in group][:-1]
    word = _widest(math.gcd(groups[2][-1][0], first, pieces[piece].numel(), *strides))
    groups[2][-1] = groups[2][-1][0] // word, word
    in_outer, in_slots, in_row = (tuple((count, stride // word) for count, stride in group) for group in groups)
    return _Table(piece, word, in_outer, in_slots, in_row, first // word)


def _merged(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge dimensions into the fewest with the same elements in the same order, at least one."""
    found: list[tuple[int, int]] = []
    for size, stride in dims:
        if found and found[-1][1] == stride * size:
            found[-1] = found[-1][0] * size, stride
        elif size > 1:
            found.append((size, stride))
    return found or [(1, 0)]


def _steps(layers: Sequence[tuple[torch.Tensor, ...]]) -> tuple[int, int] | None:
    """Bytes from a layer to the next and from K to V, if both are the same everywhere; else None."""
    first = layers[0][0]
    alike = {(part.untyped_storage().data_ptr(), part.shape, part.stride()) for parts in layers for part in parts}
    starts = [[int(part.storage_offset()) for part in parts] for parts in layers]
    by_layer = starts[1][0] - starts[0][0] if len(starts) > 1 else 0
    by_part = starts[0][1] - starts[0][0] if len(starts[0]) > 1 else 0
    even = all(
        start == starts[0][0] + layer * by_layer + part * by_part
        for layer, of_layer in enumerate(starts)
        for part, start in enumerate(of_layer)
    )
    if len(alike) > 1 or not even or min(by_layer, by_part) < 0 or (len(starts) > 1 and not by_layer):
        return None
    return by_layer * first.dtype.itemsize, by_part * first.dtype.itemsize


def _widest(size: int) -> int:
    """Bytes of the widest integers that divide ``size``."""
    return next(width for width in _WORDS if size % width == 0)
