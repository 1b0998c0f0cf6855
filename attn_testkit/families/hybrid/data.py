"""The layers of a hybrid case, and the data of a step. They consist of the layers and data of two cases, one for each
kind of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from typing_extensions import override

from ...cases.fields import Fields, Heads
from ...cases.layers import Layers
from ...contract import AttentionLayer
from ...steps.data import StepData, make_layers, make_step_data
from ...steps.schedule import Schedule, Step
from ..recurrent.data import StateStepData, make_state_data, state_layers

_Data = TypeVar("_Data", bound=Fields)
_T = TypeVar("_T")


def in_turn(states: Sequence[_T], softmax: Sequence[_T]) -> list[_T]:
    """Items for all layers, in turn: the first layer keeps a state, the second is a softmax layer, and so on."""
    found = [each for pair in zip(states, softmax, strict=False) for each in pair]
    return [*found, *states[len(softmax) :]]


def _alone(case: _Data, layers: Layers, **changes: Any) -> _Data:
    whole = case.instance_of
    changed = case.with_changes(layers=layers, **changes)
    return replace(changed, instance_of=None if whole is None else _alone(whole, layers, **changes))


def of_states(case: _Data) -> _Data:
    """The case of the layers that keep a state."""
    return _alone(case, Layers((case.layers.count + 1) // 2, case.layers.first))


def of_softmax(case: _Data) -> _Data:
    """The case of the softmax layers: as many query heads as value heads, as many KV heads as key heads."""
    q_heads, kv_heads = case.heads.q_heads, case.heads.kv_heads
    family = "mha" if q_heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    changes = {"heads": Heads(family, q_heads, kv_heads), "state": None, "data": "gauss"}
    return _alone(case, Layers(case.layers.count // 2, case.layers.first + 1), **changes)


@lru_cache(maxsize=64)
def _schedule_of(schedule: Schedule, kind: str) -> Schedule:
    return replace(schedule, case=(of_states if kind == "states" else of_softmax)(schedule.case))


def schedules(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """The schedule with the layers that keep a state, and with the softmax layers."""
    return _schedule_of(schedule, "states"), _schedule_of(schedule, "softmax")


def schedule_of_states(schedule: Schedule) -> Schedule:
    """The schedule from which data and slots of states are drawn: in a hybrid case, the schedule of its states."""
    return schedules(schedule)[0] if schedule.case.layers.hybrid else schedule


def layers(case: Fields) -> tuple[AttentionLayer, ...]:
    """Layers of the test model, in turn, with consecutive ids."""
    each = in_turn(state_layers(of_states(case)), make_layers(of_softmax(case)))
    return tuple(replace(layer, layer_id=case.layers.first + place) for place, layer in enumerate(each))


@dataclass(frozen=True, eq=False)
class HybridStepData(StepData):
    """Host tensors of a step. ``q`` holds whole rows of the model's table, and ``k`` and ``v`` nothing."""

    states: StateStepData | None = None
    """Numbers of the layers that keep a state."""
    softmax: StepData | None = None
    """Numbers of the softmax layers."""

    @override
    def of_layer(self, part: str, layer: int) -> torch.Tensor:
        data = self.softmax if layer % 2 else self.states
        assert data is not None
        return data.of_layer(part, layer // 2)


def states_in(data: StepData) -> StateStepData | None:
    """The numbers of the layers that keep a state; None for a case without any."""
    if isinstance(data, HybridStepData):
        return data.states
    return data if isinstance(data, StateStepData) else None


_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rows_in_turn(states: _Rows, softmax: _Rows) -> torch.Tensor:
    """[L, T, n]: q, k and v of a row one after the other, of all layers; NaN after the numbers of a narrower layer.

    ``states`` and ``softmax``: q, k and v [l, T, ...] of the layers of each kind.
    """
    of_each = (torch.cat([part.flatten(2) for part in parts], -1).unbind(0) for parts in (states, softmax))
    rows = in_turn(*of_each)
    widest = max(each.shape[-1] for each in rows)
    return torch.stack([torch.nn.functional.pad(each, (0, widest - each.shape[-1]), value=torch.nan) for each in rows])


def make_hybrid_data(schedule: Schedule, step: Step, pattern: str | None = None) -> HybridStepData:
    """Draw a step's numbers. ``pattern``: of the layers that keep a state."""
    of_state, of_attention = schedules(schedule)
    states, softmax = make_state_data(of_state, step, pattern), make_step_data(of_attention, step, None)
    packed = rows_in_turn(*((each.q, each.k, each.v) for each in (states, softmax)))
    common = {each.name: getattr(softmax, each.name) for each in fields(StepData)}
    common |= {"q": packed, "k": packed[..., :0], "v": packed[..., :0]}
    return HybridStepData(**common, states=states, softmax=softmax)
