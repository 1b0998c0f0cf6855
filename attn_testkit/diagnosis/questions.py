"""The questions that a family offers about a wrong row, each put to the backend once, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..families.family import Question
from ..families.table import family_of
from .attended_keys import find_attended
from .hints import Evidence, hints
from .misrouted_rows import find_misrouted
from .rerun import Rerunner

__all__ = ["Asked", "ask"]


@dataclass(frozen=True)
class Asked:
    """Evidence of a wrong step, and the backend that can be asked about it."""

    evidence: Evidence
    rerunner: Rerunner | None
    """None: the step is right as the first of a fresh instance, so running it again shows nothing."""
    in_graph: bool
    """True if the step is wrong in a graph only, so that graphs are asked."""
    texts: tuple[str, ...] = ()
    """Hints found so far, the strongest first."""


def ask(asked: Asked) -> Asked:
    """Put every question that the family of the case offers, and no other."""
    family = family_of(asked.evidence.schedule.case)
    asked = replace(asked, texts=(*asked.texts, *_supposed(asked.evidence)))
    for question, put in _PUT.items():
        if question in family.questions:
            asked = put(asked)
    return asked


def _supposed(evidence: Evidence) -> list[str]:
    """The first mistake that the family supposes and that every wrong row is right for."""
    comparison, expected = evidence.comparison, evidence.expected
    if not comparison.all_finite or comparison.right:
        return []
    out, wrong = comparison.out.double(), comparison.wrong.any(-1)
    for each in family_of(evidence.schedule.case).supposed(evidence.schedule, expected.data):
        near = ((out - each.answer.out).abs() <= each.answer.limit).all(-1)
        if bool(near[wrong].all()):
            return [each.text]
    return []


def _attended_keys(asked: Asked) -> Asked:
    if asked.rerunner is None:
        return asked
    evidence = asked.evidence
    found = find_attended(asked.rerunner, evidence.schedule, evidence.comparison, in_graph=asked.in_graph)
    return replace(asked, evidence=replace(evidence, attended=found))


def _misrouted_rows(asked: Asked) -> Asked:
    evidence = asked.evidence
    found = find_misrouted(asked.rerunner, evidence.schedule, evidence.comparison, in_graph=asked.in_graph)
    return replace(asked, evidence=replace(evidence, misrouted=found))


def _named_patterns(asked: Asked) -> Asked:
    return replace(asked, texts=(*asked.texts, *hints(asked.evidence)))


_PUT: Mapping[Question, Callable[[Asked], Asked]] = {
    Question.ATTENDED_KEYS: _attended_keys,
    Question.MISROUTED_ROWS: _misrouted_rows,
    Question.NAMED_PATTERNS: _named_patterns,
}
"""Questions in the order in which they are put: later questions use what earlier ones found."""
