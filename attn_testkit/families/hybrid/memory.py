"""The memory of a hybrid model: the pool of states, which is watched, and the KV pool next to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from ...contract import BackendContext
from ...steps.data import StepData
from ...steps.schedule import Schedule, Step
from ...watches.past_modes import past_modes
from ...watches.uploads import upload
from ..family import Memory, Noted, Stored, Watch
from ..recurrent.memory import STATE_POOL, StateWatch, moved_states
from ..softmax.memory import KV_POOL
from .data import HybridStepData, make_hybrid_data, schedules

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


def _states(data: StepData) -> StepData:
    found = cast(HybridStepData, data).states
    assert found is not None
    return found


class HybridWatch(StateWatch):
    """A watch of both pools. Its results are those of the pool of states; ``keys_written`` has the KV pool."""

    def __init__(self, context: BackendContext, schedule: Schedule) -> None:
        assert context.state is not None
        super().__init__(context.state.pool, schedules(schedule)[0])
        self._keys = KV_POOL.watch(context, schedules(schedule)[1])
        self.bits_of_keys = self._keys.bits
        """Integers of an element's bits in the KV pool."""
        self._due: _Ints = np.empty(0, np.int64)
        self._own, self._unowned = 0, math.nan

    @override
    def fill(self, name: Any, held: Callable[[], tuple[_Ints, _Bytes]], unowned: float) -> None:
        super().fill(name, held, unowned)
        self._unowned = unowned
        self._fill_keys(name)

    @override
    def carry(self, slots: torch.Tensor, name: Any) -> None:
        """Carry the states on. Keys are loaded, as in every step."""
        schedule, *step = name
        super().carry(slots, (schedules(schedule)[0], *step))
        self._fill_keys(name)

    def _fill_keys(self, name: Any) -> None:
        (schedule, step, pattern), unowned = name, self._unowned
        _, of_softmax = schedules(schedule)
        with past_modes():
            data = make_hybrid_data(schedule, step, pattern).softmax
            assert data is not None
            self._due = np.sort(KV_POOL.due(data))

        def keys() -> tuple[_Ints, _Bytes]:
            return KV_POOL.held(of_softmax, step, data, after=step.stored, unowned=unowned)

        self._keys.fill((of_softmax, step, None), keys, unowned)

    @override
    def clear(self) -> None:
        super().clear()
        self._keys.clear()

    @override
    def clear_page_0(self) -> None:
        super().clear_page_0()
        if hasattr(self, "_keys"):
            self._keys.clear_page_0()

    @override
    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        own = super().look(slots, due, count)
        self._own = len(own)
        return *own, *self._keys.look(slots, upload(torch.from_numpy(self._due), self._device), len(self._due))

    @override
    def moved(self, found: Sequence[_Bytes]) -> _Ints | None:
        return super().moved(found[: self._own])

    def keys_written(self, found: Sequence[_Bytes]) -> tuple[_Ints, _Bytes, tuple[int, ...]]:
        """KV slots that changed, and their contents, as in ``Watch.written``."""
        return self._keys.written(self._due, found[self._own :])


def _held(
    schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = math.nan
) -> tuple[_Ints, _Bytes]:
    return STATE_POOL.held(schedules(schedule)[0], step, _states(data), after=after, unowned=unowned)


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
    of_state = schedules(schedule)[0]
    return STATE_POOL.image(of_state, step, _states(data), finite_tails, after=after, unowned=unowned, marked=marked)


def _stored(data: StepData) -> Stored:
    return STATE_POOL.stored(_states(data))


def _due(data: StepData) -> _Ints:
    return STATE_POOL.due(_states(data))


def _watch(context: BackendContext, schedule: Schedule) -> Watch:
    return HybridWatch(context, schedule)


def _noted(watch: Watch, found: Sequence[_Bytes]) -> Mapping[str, Noted]:
    """States that changed before a commit, and the KV slots that changed, with their contents."""
    both = cast(HybridWatch, watch)
    slots, held, shape = both.keys_written(found)
    keys = {
        "kv slots": (torch.int64, slots.shape, slots.view(np.uint8)),
        "kv rows": (both.bits_of_keys, shape, held),
    }
    return {**moved_states(watch, found), **keys}


BOTH_POOLS = Memory(
    watch=_watch,
    held=_held,
    image=_image,
    stored=_stored,
    due=_due,
    carry=STATE_POOL.carry,
    before_commit=STATE_POOL.before_commit,
    noted=_noted,
)
