"""The layers of a model together: each family computes its own, on its own memory. Most cases have one family; a
hybrid model has several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import torch

from ..cases.case import Case
from ..cases.fields import C, Fields
from ..cases.layers import Layers
from ..contract import AttentionLayer
from ..steps.data import StepData
from ..steps.greedy_loop import Vocabulary
from ..steps.schedule import Schedule, Step
from .family import Answer, Family, Supposition, Texts
from .table import FAMILIES, families_of, family_of

_T = TypeVar("_T")


def case_of(case: C, family: str) -> C:
    """The case with only the layers of a family; the case itself if it has no others."""
    places = case.places(family)
    if len(places) == case.layers.count:
        return case
    beside, whole = FAMILIES[family].beside, case.instance_of
    changes = beside.changes(case) if beside and family != family_of(case).name else {}
    alone = case.with_changes(layers=Layers(len(places), case.layers.first + places[0]), **changes)
    return replace(alone, instance_of=None if whole is None else case_of(whole, family))


@lru_cache(maxsize=64)
def schedule_of(schedule: Schedule, family: str) -> Schedule:
    """The schedule with only the layers of a family."""
    case = case_of(schedule.case, family)
    return schedule if case is schedule.case else replace(schedule, case=case)


def _of_each(case: Fields, make: Callable[[Family], _T]) -> dict[str, _T]:
    """Name of each family -> what is made of it."""
    return {family.name: make(family) for family in families_of(case)}


def _by_layer(case: Fields, parts: Mapping[str, Sequence[_T]]) -> list[_T]:
    """Items of all layers in the order of the model. ``parts``: items of the layers of each family."""
    left = {family: iter(items) for family, items in parts.items()}
    return [next(left[family]) for family in case.families]


def layers(case: Fields) -> tuple[AttentionLayer, ...]:
    """The layers of the test model, with consecutive ids."""
    found = _by_layer(case, _of_each(case, lambda family: family.layers(case_of(case, family.name))))
    return tuple(replace(layer, layer_id=case.layers.first + place) for place, layer in enumerate(found))


def _rows(case: Fields, parts: Mapping[str, StepData] | Mapping[str, Vocabulary]) -> torch.Tensor:
    """[L, T, n]: q, k and v of a row one after the other, of all layers; NaN after the numbers of a narrower layer."""
    packed = {name: torch.cat([x.flatten(2) for x in (of.q, of.k, of.v)], -1).unbind() for name, of in parts.items()}
    rows = _by_layer(case, packed)
    widest = max(row.shape[-1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, widest - row.shape[-1]), value=torch.nan) for row in rows])


def _joined(case: Fields, parts: Mapping[str, StepData]) -> StepData:
    *_, last = parts.values()
    if len(parts) == 1:
        return last
    rows = _rows(case, parts)
    return replace(last, q=rows, k=rows[..., :0], v=rows[..., :0], parts=parts, families=case.families)


def make_data(schedule: Schedule, step: Step, pattern: str | None = None) -> StepData:
    """Draw a step's numbers: ``Family.data``. ``pattern`` is one of the family of the case's heads."""
    own = family_of(schedule.case)
    return _joined(
        schedule.case,
        _of_each(
            schedule.case,
            lambda family: family.data(schedule_of(schedule, family.name), step, pattern if family is own else None),
        ),
    )


def _texts(family: Family) -> Texts:
    assert family.texts is not None
    return family.texts


def make_vocabulary(case: Case) -> Vocabulary:
    """The numbers of every token id. With several families, ``q`` holds whole rows of the model's table."""
    parts = _of_each(case, lambda family: _texts(family).vocabulary(case_of(case, family.name)))
    *_, last = parts.values()
    if len(parts) == 1:
        return last
    rows = _rows(case, parts)
    return Vocabulary(rows, rows[..., :0], rows[..., :0], last.hidden)


def data_of_texts(schedule: Schedule, tokens: Sequence[Sequence[int]]) -> StepData:
    """Input of the oracle for plain decode of texts: ``Texts.data``."""
    return _joined(
        schedule.case,
        _of_each(schedule.case, lambda family: _texts(family).data(schedule_of(schedule, family.name), tokens)),
    )


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """Outputs of a step, and their limits: ``Family.answer``."""
    return _answers(schedule.case, _answer_of_each(schedule, data, given))


def _answer_of_each(schedule: Schedule, data: StepData, given: bool) -> dict[str, Answer]:
    return _of_each(
        schedule.case,
        lambda family: family.answer(schedule_of(schedule, family.name), data.parts.get(family.name, data), given),
    )


def _answers(case: Fields, parts: Mapping[str, Answer]) -> Answer:
    if len(parts) == 1:
        return next(iter(parts.values()))
    out, limit = (
        torch.stack(_by_layer(case, {name: getattr(of, part).unbind() for name, of in parts.items()}))
        for part in ("out", "limit")
    )
    return Answer(out=out, limit=limit)


def supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    """Results of backends with a usual mistake in the layers of one family: ``Family.supposed``."""
    case, (own, *others) = schedule.case, families_of(schedule.case)
    if not others:
        yield from own.supposed(schedule, data)
        return
    right = _answer_of_each(schedule, data, False)
    for family in (own, *others):
        for each in family.supposed(schedule_of(schedule, family.name), data.parts[family.name]):
            yield replace(each, answer=_answers(case, {**right, family.name: each.answer}))
