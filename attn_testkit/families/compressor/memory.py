"""The memory of compressors: states of tokens and compressed rows, as one row of numbers for each slot.

A slot's row has the state of its token, and, if the slot is the last of its group, the group's compressed row. Rows of
other slots have zeros there. So a compressed row belongs to the slot of the token that completes its group. States from
which later rows are made hold numbers. All other memory holds NaN, also the compressed rows of earlier groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from ...contract import BackendContext
from ...contract.compressor_layer import CompressorLayer, CompressorPool
from ...contract.row_format import ALL_NAN
from ...steps.data import StepData
from ...steps.schedule import Schedule, Step
from ...watches.changed_rows import changed_rows
from ...watches.past_modes import past_modes
from ...watches.pool_rows import BITS
from ...watches.uploads import upload
from ..family import Memory, Stored, Watch
from .data import CompressorData

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]
_Parts = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class CompressorWatch:
    """A watch of a ``CompressorPool``."""

    def __init__(self, pool: CompressorPool) -> None:
        self.bits = torch.int32
        self._pool, self._page_size, self._device = pool, pool.page_size, pool.device
        self._ratio, self._wide = pool.layers[0].compress_ratio, 2 * pool.layers[0].width
        self._now: _Parts = pool.parts
        self._before: _Parts = tuple((states.clone(), rows.clone()) for states, rows in pool.parts)

    def _load(self) -> None:
        for now, before in zip(self._now, self._before, strict=True):
            for one, other in zip(now, before, strict=True):
                one.copy_(other)

    def _fill(self, unowned: float) -> None:
        for pair in self._before:
            for part in pair:
                if part.dtype == torch.uint8:
                    # A byte of ALL_NAN is NaN in every plane of a row.
                    part.fill_(ALL_NAN if math.isnan(unowned) else 0)
                else:
                    part.fill_(unowned)

    def fill(self, name: object, held: Callable[[], tuple[_Ints, _Bytes]], unowned: float) -> None:
        """Do the work of ``Watch.fill``. Compressed rows are never read, so none is held."""
        slots, raw = held()
        sent = upload(torch.from_numpy(slots), self._device), upload(torch.from_numpy(raw), self._device)
        with past_modes():
            self._fill(unowned)
            if len(slots):
                numbers = sent[1].contiguous().view(torch.float32).view(len(self._now), len(slots), -1)
                for (states, _), own in zip(self._before, numbers, strict=True):
                    states[sent[0]] = own[:, : self._wide].view(len(slots), *states.shape[1:])
            self._load()

    def clear(self) -> None:
        """Do the work of ``Watch.clear``."""
        self._fill(math.nan)
        self._load()
        self.clear_page_0()

    def clear_page_0(self) -> None:
        """Fill the states and compressed rows of page 0 with zeros."""
        for part in self._pool.page_0():
            part.zero_()

    def _changed(self) -> torch.Tensor:
        """[slots] uint8: 1 for a slot whose state changed, or the compressed row that belongs to it."""
        found = torch.zeros(self._pool.num_slots, dtype=torch.bool, device=self._device)
        layers = zip(self._pool.layers, self._now, self._before, strict=True)
        for layer, (state, rows), (state_before, rows_before) in layers:
            found |= _differs(state, state_before).flatten(1).any(1)
            for one, other in zip(self._planes(layer, rows), self._planes(layer, rows_before), strict=True):
                found[self._ratio - 1 :: self._ratio] |= _differs(one, other).any(-1).flatten()
        return found.view(torch.uint8)

    def _planes(self, layer: CompressorLayer, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the planes of compressed rows [..., numbers], or of the rows."""
        return (rows,) if self._pool.packed(layer) is None else self._pool.planes_of(layer, rows)

    def written_since_clear(self) -> _Ints:
        """Do the work of ``Watch.written_since_clear``."""
        slots: _Ints = np.flatnonzero(self._changed().cpu().numpy())
        return slots[slots >= self._page_size]

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[L, n, bytes] of what slots hold now, as float32."""
        last = (slots % self._ratio == self._ratio - 1)[:, None]
        found = []
        for layer, (states, rows) in zip(self._pool.layers, self._now, strict=True):
            packed, at = self._pool.packed(layer), slots // self._ratio
            if packed is None:
                own = rows[at].float()
            else:
                own = packed.unpack(torch.cat([plane.flatten(0, 1)[at] for plane in self._planes(layer, rows)], -1))
            found.append(torch.cat([states[slots].flatten(1), torch.where(last, own, 0.0)], -1))
        return torch.stack(found).view(torch.uint8)

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Do the work of ``Watch.look``: flags of slots, rows of those of ``due``."""
        rows = self._rows(due).reshape(-1)
        return (self._changed()[:slots], slots), (rows, rows.numel())

    def written(self, due: _Ints, found: Sequence[_Bytes]) -> tuple[_Ints, _Bytes, tuple[int, ...]]:
        """Do the work of ``Watch.written``: rows [L, 1, n, 1, numbers]."""
        layers = len(self._now)
        changed, rows = changed_rows(due, found[0], found[1], layers, self._rows, self._device)
        return changed, rows.reshape(-1), (layers, 1, len(changed), 1, rows.shape[-1] // self.bits.itemsize)

    def outside(self, found: Sequence[_Bytes]) -> _Ints:
        """Do the work of ``Watch.outside``: slots have no memory between them."""
        return np.empty(0, np.int64)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Bool in the shape of both: True for elements whose bits differ."""
    bits = BITS[one.dtype.itemsize]
    return one.view(bits) != other.view(bits)


def _held(
    schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = math.nan
) -> tuple[_Ints, _Bytes]:
    """Slots and rows of tokens before the step of whose states later rows are made."""
    data = cast(CompressorData, data)
    first = data.compression.first_needed
    runs = [(place, first(each.prefix), each) for place, each in enumerate(step.requests)]
    slots = [each.slots[start : each.prefix] for _, start, each in runs]
    parts = [data.states[:, place, start : each.prefix] for place, start, each in runs]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    rows = torch.cat(parts, 1).flatten(2)
    return np.concatenate(slots), rows.contiguous().view(torch.uint8).numpy()


def _image(
    schedule: Schedule,
    step: Step,
    data: StepData,
    finite_tails: bool,
    *,
    after: bool,
    unowned: float = math.nan,
    marked: str = "",
) -> torch.Tensor:
    """[L, 1, slots, 1, numbers] float32."""
    case, ratio = schedule.case, cast(CompressorData, data).compression.ratio
    slots, raw = _held(schedule, step, data, after=after)
    states = torch.from_numpy(raw).view(torch.float32).view(case.layers.count, len(slots), -1)
    wide, count = 2 * data.q.shape[-1], (schedule.num_pages + 1) * case.page_size
    image = torch.full((case.layers.count, count, wide + case.head_dim), unowned)
    last = torch.arange(count) % ratio == ratio - 1
    image[:, ~last, wide:] = 0.0
    if len(slots):
        image[:, torch.from_numpy(slots), :wide] = states
    if after:
        stored = _stored(data)
        image[:, stored.slots] = stored.rows[:, 0, :, 0]
    return image[:, None, :, None]


def _stored(data: StepData) -> Stored:
    """States of the step's tokens, which are exact, and the rows of groups that they complete, within their limits."""
    from .compress import compress

    data = cast(CompressorData, data)
    made = compress(data)
    states = data.states[:, data.row_request, data.row_key].flatten(2)
    slots, order = data.out_cache_loc.sort()
    rows = torch.cat([states, made.rows.float()], -1)[:, order]
    limit = torch.cat([torch.zeros_like(states, dtype=torch.float64), made.limit], -1)[:, order]
    return Stored(slots, rows[:, None, :, None], limit[:, None, :, None])


def _watch(context: BackendContext, schedule: Schedule) -> Watch:
    assert context.compressor is not None
    return CompressorWatch(context.compressor.pool)


COMPRESSOR_POOL = Memory(watch=_watch, held=_held, image=_image, stored=_stored)
