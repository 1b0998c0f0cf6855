"""The pool of states as memory: what it holds before a step, how it is watched, and what a step leaves in it.

A slot's row is one string of bytes in each layer: its convolution window, then its state. All other memory holds NaN:
unowned slots, slot 0, the slot of a fresh request if the backend reads ``has_initial_state``, and the memory between
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from ...contract import BackendContext, ForwardMode, StatePool
from ...steps.data import StepData
from ...steps.schedule import Schedule, Step
from ...watches.changed_rows import changed_rows
from ...watches.past_modes import past_modes
from ...watches.pool_rows import BITS
from ...watches.signaling_nan import fill_with_signaling_nan
from ...watches.uploads import upload
from ..family import Memory, Noted, Stored, Watch
from .data import StateStepData, make_state_data, shape_of, state_places, state_pool_slots

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]
_NAN = 0xFF
"""A byte of the memory between tensors. A number that consists of it is NaN in every dtype of states."""


def as_rows(windows: torch.Tensor, states: torch.Tensor, order: str) -> torch.Tensor:
    """[L, n, bytes] uint8 of windows [L, n, C, W - 1] and states [L, n, Hv, V, K], in dtypes of the pool."""
    states = states if order == "vk" else states.transpose(-1, -2)
    parts = [part.contiguous().flatten(2) for part in (windows, states)]
    return torch.cat([part.view(torch.uint8) for part in parts if part.shape[-1]], -1)


def _with_more_columns(windows: torch.Tensor, data: StateStepData) -> torch.Tensor:
    """Windows [L, n, C, W - 1] with the further columns that only drafts of the instance use, or nobody: NaN."""
    if not data.more_columns:
        return windows
    more = torch.empty(*windows.shape[:3], data.more_columns, dtype=windows.dtype)
    fill_with_signaling_nan(more)
    return torch.cat([windows, more], -1)


def from_rows(rows: torch.Tensor, data: StateStepData) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [L, n, C, columns] in the model's dtype and states [L, n, Hv, V, K] in theirs, from rows [L, n, bytes].
    ``StateStepData.more_columns`` are left out: no step reads them.
    """
    heads, wide, keys = data.states.shape[2:]
    windows, states = _parts_of(rows, data)
    windows, states = windows[..., : _own_columns(data)], states.view(data.states.dtype)
    if data.shape.order == "vk":
        return windows, states.view(*rows.shape[:2], heads, wide, keys)
    return windows, states.view(*rows.shape[:2], heads, keys, wide).transpose(-1, -2)


def more_columns_in(rows: torch.Tensor, data: StateStepData) -> torch.Tensor:
    """[L, n, C, ``StateStepData.more_columns``] in the model's dtype, from rows [L, n, bytes]."""
    return _parts_of(rows, data)[0][..., _own_columns(data) :]


def _own_columns(data: StateStepData) -> int:
    return data.shape.window_columns(data.nodes) + data.history


def _parts_of(rows: torch.Tensor, data: StateStepData) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [L, n, C, all columns], and bytes of states [L, n, bytes]."""
    shape = *rows.shape[:2], data.windows.shape[2], _own_columns(data) + data.more_columns
    size = shape[2] * shape[3] * data.windows.dtype.itemsize
    return rows[..., :size].contiguous().view(data.windows.dtype).view(shape), rows[..., size:].contiguous()


def _held(
    schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = math.nan
) -> tuple[_Ints, _Bytes]:
    """Slots and rows of requests that have a state before the step, and of fresh ones that the server clears."""
    data = cast(StateStepData, data)
    there = ~data.fresh
    if data.shape.fresh == "zeroed" or schedule.case.mode is not ForwardMode.EXTEND:
        # A decode has no flag: a state is read.
        there = torch.ones_like(there)
    if data.lists.shape[1] > 1:
        return _held_by_lists(data)
    rows = as_rows(_with_more_columns(data.windows[:, there], data), data.states[:, there], data.shape.order)
    return np.array(data.sources, np.int64)[there.numpy()], rows.numpy()


def _held_by_lists(data: StateStepData) -> tuple[_Ints, _Bytes]:
    """Slots and rows of requests with a slot for each node: one slot holds the window, one slot holds the state, and
    the other slots hold NaN. Values of rejected nodes are NaN, too: columns of a window that are not read, and the
    other states.
    """
    (count, nodes), layers = data.lists.shape, len(data.states)
    columns = data.shape.window_columns(nodes)
    states = torch.empty(layers, count, nodes, *data.states.shape[2:], dtype=data.states.dtype)
    windows = torch.empty(layers, count, nodes, data.windows.shape[2], columns, dtype=data.windows.dtype)
    fill_with_signaling_nan(states, windows)
    width = data.windows.shape[-1]
    for request, taken in enumerate(data.taken):
        states[:, request, taken - 1] = data.states[:, request]
        windows[:, request, 0, :, taken - 1 : taken - 1 + width] = data.windows[:, request]
    rows = as_rows(windows.flatten(1, 2), states.flatten(1, 2), data.shape.order)
    return data.lists.reshape(-1), rows.numpy()


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
    """[L, 1, slots, 1, bytes] uint8."""
    chain = [cast(StateStepData, data)]
    while chain[0].before is not None:
        chain.insert(0, chain[0].before)
    slots, rows = _held(schedule, step, chain[0], after=False, unowned=unowned)
    columns = _own_columns(chain[0]) + chain[0].more_columns
    window = torch.empty(1, 1, chain[0].windows.shape[2], columns, dtype=chain[0].windows.dtype)
    state = torch.empty(1, 1, *chain[0].states.shape[2:], dtype=chain[0].states.dtype)
    fill_with_signaling_nan(window, state)
    found = as_rows(window, state, chain[0].shape.order).repeat(len(rows), state_pool_slots(schedule), 1)
    found[:, slots] = torch.from_numpy(rows)
    for each in chain:
        own, sources, cleared = _filled_by_the_server(each)
        found[:, own], found[:, cleared] = found[:, sources], 0
        if after or each is not chain[-1]:
            stored = _stored(each)
            found[:, stored.slots] = stored.rows[:, 0, :, 0]
    return found[:, None, :, None]


def _filled_by_the_server(data: StateStepData) -> tuple[_Ints, _Ints, _Ints]:
    """Slots that a server fills between two steps, the slots of a prefix cache that it copies to them, and the slots of
    fresh requests that it clears.
    """
    own, sources = data.slots.numpy(), np.array(data.sources, np.int64)
    copied = (own != sources) & (data.shape.continues == "copy")
    cleared = data.fresh.numpy() & (data.before is not None and data.shape.fresh == "zeroed")
    return own[copied], sources[copied], own[cleared]


def _stored(data: StepData) -> Stored:
    """Rows that the step should leave. Windows are copies; states are computed, and ``checks/states.py`` compares
    them within their limits.
    """
    from .recurrence import recur

    data = cast(StateStepData, data)
    found = recur(data)
    slots, order = torch.tensor([end.slot for end in data.ends], dtype=torch.int64).sort()
    rows = as_rows(_with_more_columns(found.windows, data), found.states.to(data.states.dtype), data.shape.order)[
        :, order
    ]
    return Stored(slots, rows[:, None, :, None])


def _due(data: StepData) -> _Ints:
    return np.array([end.slot for end in cast(StateStepData, data).ends], np.int64)


class StateWatch:
    """A watch of a ``StatePool``. Slots are those of the schedule.

    In a big pool only these slots are filled and compared. The rest is never touched.
    """

    def __init__(self, pool: StatePool, schedule: Schedule) -> None:
        self.bits = torch.uint8
        """Rows are bytes."""
        self._device, places = pool.device, state_places(schedule)
        self._slots = len(places) if shape_of(schedule.case).big else pool.num_slots
        self._places = upload(torch.from_numpy(places), self._device) if self._slots < pool.num_slots else None
        """Slot of the pool for each slot of the schedule, [slots]; None if both are the same."""
        self._pool, self._twin = pool, pool.like(pool.device, num_slots=self._slots)
        self._moved: torch.Tensor | None = None
        """[slots] uint8: states that changed before the commit of a verify; None outside of target-verify."""
        self._between: torch.Tensor | None = None
        """Memory that belongs to no slot, [bytes] bool; None: it is not compared."""
        if self._places is None:
            marks = pool.like("cpu")
            for part in marks.parts:
                _bytes_of(part, pool.num_slots).fill_(1)
            self._between = (marks.memory == 0).to(self._device)

    def _now(self) -> tuple[torch.Tensor, ...]:
        """Window and state of each layer, in sequence, of the slots: views, or copies of those of a big pool."""
        return self._pool.parts if self._places is None else tuple(part[self._places] for part in self._pool.parts)

    def _load(self) -> None:
        """Write the expected contents of the slots into the pool."""
        if self._places is None:
            self._pool.memory.copy_(self._twin.memory)
            return
        for part, held in zip(self._pool.parts, self._twin.parts, strict=True):
            part[self._places] = held

    def _fill(self, unowned: float) -> None:
        self._twin.memory.fill_(_NAN)
        if math.isnan(unowned):
            fill_with_signaling_nan(*self._twin.parts)
            return
        for part in self._twin.parts:
            part.fill_(unowned)

    def fill(self, name: object, held: Callable[[], tuple[_Ints, _Bytes]], unowned: float) -> None:
        """Do the work of ``Watch.fill``."""
        slots, rows = held()
        sent = upload(torch.from_numpy(slots), self._device), upload(torch.from_numpy(rows), self._device)
        with past_modes():
            self._fill(unowned)
            if len(slots):
                self._put(*sent)
            self._load()
            for part in self._pool.scratch_parts:
                part.fill_(math.nan)
        self._moved = None

    def carry(self, slots: torch.Tensor, name: tuple[Schedule, Step, str | None]) -> None:
        """Use the present contents of ``slots`` as their contents before the next step. Other slots keep their
        contents. Then states of a prefix cache are copied, and slots of fresh requests cleared, as by a server: in
        memory, and in its expected contents.
        """
        own, sources, cleared = (
            upload(torch.from_numpy(each), self._device) for each in _filled_by_the_server(make_state_data(*name))
        )
        with past_modes():
            for now, before in zip(self._now(), self._twin.parts, strict=True):
                before[slots] = now[slots]
            filled = torch.cat([own, cleared])
            for part, before in zip(self._pool.parts, self._twin.parts, strict=True) if len(filled) else ():
                before[own], before[cleared] = before[sources], 0
                part[filled if self._places is None else self._places[filled]] = before[filled]
            for part in self._pool.scratch_parts:
                part.fill_(math.nan)
        self._moved = None

    def _put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        first = 0
        for index, part in enumerate(self._twin.parts):
            layer, second = divmod(index, 2)
            first = first if second else 0
            shape = part.shape[1:]
            size = math.prod(shape) * part.dtype.itemsize
            if size:
                part[slots] = rows[layer, :, first : first + size].contiguous().view(part.dtype).view(-1, *shape)
            first = size

    def clear(self) -> None:
        """Do the work of ``Watch.clear``."""
        self._fill(math.nan)
        self._load()
        self.clear_page_0()

    def clear_page_0(self) -> None:
        """Fill slot 0 with zeros."""
        for part in self._pool.parts:
            part[0].zero_()

    def _changed(self) -> torch.Tensor:
        """[slots] uint8: not 0 if a bit of the slot changed."""
        found = torch.zeros(self._slots, dtype=torch.bool, device=self._device)
        for now, before in zip(self._now(), self._twin.parts, strict=True):
            if now[0].numel():
                bits = BITS[now.dtype.itemsize]
                found |= (now.view(bits) != before.view(bits)).flatten(1).any(1)
        return found.view(torch.uint8)

    def before_commit(self) -> None:
        """Note the states that a verify changed, before its commit. Windows may be anything until then."""
        found = torch.zeros(self._slots, dtype=torch.bool, device=self._device)
        for now, before in zip(self._now()[1::2], self._twin.parts[1::2], strict=True):
            bits = BITS[now.dtype.itemsize]
            found |= (now.view(bits) != before.view(bits)).flatten(1).any(1)
        self._moved = found.view(torch.uint8)

    def moved(self, found: Sequence[_Bytes]) -> _Ints | None:
        """Slots whose states a verify changed before its commit, ascending; None outside of target-verify."""
        return np.flatnonzero(found[3]) if len(found) > 3 else None

    def written_since_clear(self) -> _Ints:
        """Do the work of ``Watch.written_since_clear``."""
        slots: _Ints = np.flatnonzero(self._changed().cpu().numpy())
        return slots[slots >= 1]

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[L, n, bytes] of what slots hold now."""
        found, parts = [], self._now()
        for index in range(0, len(parts), 2):
            pair = [part[slots].reshape(len(slots), -1) for part in parts[index : index + 2]]
            found.append(torch.cat([each.contiguous().view(torch.uint8) for each in pair if each.shape[-1]], -1))
        return torch.stack(found)

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Do the work of ``Watch.look``: flags of all slots, rows of those of ``due``, flags of memory between."""
        rows = self._rows(due).reshape(-1)
        place = torch.zeros(16, dtype=torch.uint8, device=self._device)
        if self._between is not None:
            apart = (self._pool.memory != self._twin.memory) & self._between
            place = torch.stack([apart.any().long(), apart.to(torch.uint8).argmax()]).view(torch.uint8)
        moved = () if self._moved is None else ((self._moved, self._slots),)
        return (self._changed(), self._slots), (rows, rows.numel()), (place, 16), *moved

    def written(self, due: _Ints, found: Sequence[_Bytes]) -> tuple[_Ints, _Bytes, tuple[int, ...]]:
        """Do the work of ``Watch.written``: rows [L, 1, n, 1, bytes]."""
        layers = len(self._pool.layers)
        changed, rows = changed_rows(due, found[0], found[1], layers, self._rows, self._device)
        return changed, rows.reshape(-1), (layers, 1, len(changed), 1, rows.shape[-1])

    def outside(self, found: Sequence[_Bytes]) -> _Ints:
        """Do the work of ``Watch.outside``: the first byte between slots that changed."""
        any_changed, first = found[2].view(np.int64)
        return np.array([first] if any_changed else [], np.int64)


def _bytes_of(part: torch.Tensor, slots: int) -> torch.Tensor:
    """View of a tensor's bytes [slots, bytes]; empty for one without elements."""
    if not part[0].numel():
        return torch.empty(slots, 0, dtype=torch.uint8)
    size = math.prod(part.shape[1:]) * part.dtype.itemsize
    flat = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
    return flat.as_strided(
        (slots, size), (part.stride(0) * part.dtype.itemsize, 1), part.storage_offset() * part.dtype.itemsize
    )


def _watch(context: BackendContext, schedule: Schedule) -> Watch:
    assert context.state is not None
    return StateWatch(context.state.pool, schedule)


def moved_states(watch: Watch, found: Sequence[_Bytes]) -> Mapping[str, Noted]:
    """Slots whose states a verify changed before its commit, under their name for checks."""
    moved = cast(StateWatch, watch).moved(found)
    return {} if moved is None else {"moved": (torch.int64, moved.shape, moved.view(np.uint8))}


STATE_POOL = Memory(
    watch=_watch,
    held=_held,
    image=_image,
    stored=_stored,
    due=_due,
    carry=lambda watch, slots, name: cast(StateWatch, watch).carry(slots, name),
    before_commit=lambda watch: cast(StateWatch, watch).before_commit(),
    noted=moved_states,
)
