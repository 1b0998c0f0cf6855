"""Hybrid models as a family: the record that combines the families of states and of softmax attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from ...steps.data import StepData
from ...steps.schedule import Schedule
from ..family import Answer, Family, Supposition, Texts
from ..recurrent.family import RECURRENT
from ..softmax.family import SOFTMAX
from .data import HybridStepData, in_turn, layers, make_hybrid_data, schedules
from .memory import BOTH_POOLS
from .texts import data_of_hybrid_tokens, make_hybrid_vocabulary


def _joined(states: Answer, softmax: Answer) -> Answer:
    def both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack(in_turn(one.unbind(0), other.unbind(0)))

    return Answer(out=both(states.out, softmax.out), limit=both(states.limit, softmax.limit))


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """Outputs of a step, and their limits."""
    data = cast(HybridStepData, data)
    of_states, of_softmax = schedules(schedule)
    assert data.states is not None
    assert data.softmax is not None
    return _joined(RECURRENT.answer(of_states, data.states, given), SOFTMAX.answer(of_softmax, data.softmax, given))


def _supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    data = cast(HybridStepData, data)
    assert data.states is not None
    softmax = answer(schedule, data, False)
    for each in RECURRENT.supposed(schedules(schedule)[0], data.states):
        out, limit = softmax.out.clone(), softmax.limit.clone()
        out[::2], limit[::2] = each.answer.out, each.answer.limit
        yield replace(each, answer=Answer(out=out, limit=limit))


HYBRID = Family(
    name="hybrid",
    features=RECURRENT.features | {"KV layout"},
    layers=layers,
    data=make_hybrid_data,
    memory=BOTH_POOLS,
    texts=Texts(vocabulary=make_hybrid_vocabulary, data=data_of_hybrid_tokens),
    answer=answer,
    supposed=_supposed,
    poisoned="slots of other owners and of fresh requests, and KV slots that nobody owns",
    reads="reads-own-state",
)
