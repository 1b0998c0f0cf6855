"""Texts of hybrid models: the values of a token in the layers of each kind, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ...cases.case import Case
from ...steps.data import StepData
from ...steps.greedy_loop import Vocabulary, data_of_tokens, make_vocabulary
from ...steps.schedule import Schedule
from ..recurrent.texts import data_of_state_tokens, make_state_vocabulary
from .data import HybridStepData, of_softmax, of_states, rows_in_turn, schedules


def make_hybrid_vocabulary(case: Case) -> Vocabulary:
    """The numbers of every token id: ``q`` holds whole rows of the model's table, and ``k`` and ``v`` nothing."""
    states, softmax = make_state_vocabulary(of_states(case)), make_vocabulary(of_softmax(case))
    rows = rows_in_turn(*((each.q, each.k, each.v) for each in (states, softmax)))
    return Vocabulary(rows, rows[..., :0], rows[..., :0], softmax.hidden)


def data_of_hybrid_tokens(schedule: Schedule, tokens: Sequence[Sequence[int]]) -> HybridStepData:
    """Input of the oracle for plain decode of texts."""
    of_state, of_attention = schedules(schedule)
    states, softmax = data_of_state_tokens(of_state, tokens), data_of_tokens(of_attention, tokens)
    rows = rows_in_turn(*((each.q, each.k, each.v) for each in (states, softmax)))
    common = {each.name: getattr(softmax, each.name) for each in fields(StepData)}
    common |= {"q": rows, "k": rows[..., :0], "v": rows[..., :0]}
    return HybridStepData(**common, states=states, softmax=softmax)
