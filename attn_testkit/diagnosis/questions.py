"""The questions that a family offers about a wrong row, each put to the backend once, in a fixed order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..checks import Comparison
from ..families.by_layer import supposed
from ..families.expected import expect
from ..families.family import Question, Supposition
from ..families.table import family_of
from ..steps.schedule import Schedule, Step
from .attended_keys import find_attended
from .hints import Evidence, hints
from .hints.evidence import explains
from .launch_grids import programs_of_nobody
from .misrouted_rows import find_misrouted
from .moved_columns import moved_columns
from .rerun import Rerunner, TimeUp


@dataclass(frozen=True)
class Asked:
    """Evidence of a wrong step, and the backend for further experiments."""

    evidence: Evidence
    rerunner: Rerunner | None
    """None: the step is right as the first of a fresh instance, so running it again shows nothing."""
    in_graph: bool
    """True if the step is wrong only in a graph, so that graphs are run."""
    texts: tuple[str, ...] = ()
    """Hints found so far, the strongest first."""


def ask(asked: Asked) -> Asked:
    """Ask every question that the family of the case offers, and no other."""
    evidence, case = asked.evidence, asked.evidence.schedule.case
    # Questions and patterns of a family are only about its own layers.
    questions = family_of(case).questions if len(set(case.families)) == 1 else frozenset[Question]()
    if asked.rerunner is not None and not evidence.comparison.right:
        nobody = ""
        with contextlib.suppress(TimeUp):
            nobody = programs_of_nobody(asked.rerunner, evidence.schedule, evidence.step, in_graph=asked.in_graph)
        if nobody:
            # An experiment has shown it: whatever rows hold or attended to follows from that.
            return replace(asked, texts=(*asked.texts, nobody))
    # Sets of heads that eager mode finds are not misread because of their shape.
    found = [] if asked.in_graph and evidence.expected.data.by_head else _supposed(evidence)
    with contextlib.suppress(TimeUp):
        found = found or _supposed_of_slots(asked)
    asked = replace(asked, texts=(*asked.texts, *found))
    for question, put in _PUT.items():
        if question in questions:
            with contextlib.suppress(TimeUp):
                asked = put(asked)
    return asked


def _supposed(evidence: Evidence) -> list[str]:
    """The first mistake that the family supposes and that every wrong row is right for."""
    comparison, expected = evidence.comparison, evidence.expected
    wrong = comparison.wrong.flatten(2).any(-1)
    finite = comparison.finite.flatten(2).all(-1)
    # Where a mistake gives NaN it shows little: numbers have to be right for it as well.
    if comparison.right or (not comparison.all_finite and int((wrong & finite).sum()) < _FEWEST_ROWS):
        return []
    off = (comparison.out.double() - expected.attention).abs() > expected.attention_limit
    if not bool((off | ~comparison.finite)[comparison.wrong.any(-1)].any()):
        # Only the sum of a row is wrong: within such limits any answer fits.
        return []
    lens = torch.tensor(evidence.step.lens)[expected.data.row_request]
    told = comparison.wrong.any(-1)
    if expected.data.by_head:
        # Heads of a wrong row that are right contradict a mistake about heads.
        told = told.any(-1, keepdim=True).expand_as(told)
    for each in supposed(evidence.schedule, expected.data):
        near = _near(comparison, each)
        if not bool(near[told].all()) or not explains(comparison, each.answer.out):
            continue
        where = _where_it_is_made(comparison, near.all(-1), lens)
        if where is not None:
            return [f"{each.text}{where}"]
    return []


def _near(comparison: Comparison, mistake: Supposition) -> torch.Tensor:
    """Heads of rows that are what the supposed backend gives, [L, T, Hq] bool."""
    out, answer = comparison.out.double(), mistake.answer
    near: torch.Tensor = (out - answer.out).abs() <= answer.limit
    # For a row without a key a backend returns 0 / 0, or 0.
    return (near | (answer.out.isnan() & (out.isnan() | (out == 0)))).all(-1)


_FEWEST_ROWS = 2
"""Fewest rows of layers that show a mistake about slots: a single one may be right for another reason."""


def _supposed_of_slots(asked: Asked) -> list[str]:
    """The only mistake that the family supposes and that gives the step's numbers with zeros in unowned slots.

    Every row of a wrong layer about which anything is known has to be right for the mistake, right rows included; other
    rows hold NaN or unowned memory. A mistake is not reported if another one gives the same numbers.
    """
    evidence, rerunner = asked.evidence, asked.rerunner
    schedule, step = evidence.schedule, evidence.step
    family = family_of(schedule.case)
    if evidence.comparison.right or evidence.in_graph or rerunner is None:
        return []
    # A key that no row selects may hold NaN, which is all that shows then.
    steps = [step, family.with_unread_finite(step)] if family.unread else [step]
    return next(filter(None, (_supposed_of_slots_in(each, schedule, rerunner) for each in dict.fromkeys(steps))), [])


def _supposed_of_slots_in(step: Step, schedule: Schedule, rerunner: Rerunner) -> list[str]:
    family, expected = family_of(schedule.case), expect(schedule, step)
    of_slots = list(family.supposed_of_slots(schedule, expected.data, step))
    observed = rerunner.eager(schedule, step, unowned=0.0) if of_slots else None
    if observed is None:
        return []
    comparison = Comparison(observed, expected)
    lens = torch.tensor(step.lens)[expected.data.row_request]
    shown = {each.text: where for each in of_slots if (where := _shown(comparison, each, lens)) is not None}
    # A mistake that every request makes needs no threshold. Two that differ only in right requests are one.
    everywhere = [text for text, where in shown.items() if not where]
    if len(everywhere) > 1 or not shown:
        return []
    text = (everywhere or [*shown])[0]
    wrong = comparison.wrong.any(-1)
    others = supposed(schedule, expected.data)
    return [] if any(_near(comparison, other)[wrong].all() for other in others) else [f"{text}{shown[text]}"]


def _shown(comparison: Comparison, mistake: Supposition, lens: torch.Tensor) -> str | None:
    """Requests in which the mistake is made, empty for everywhere, if all known wrong rows are also wrong in the
    supposed backend, and at least half of its wrong rows are known; else None. Right rows may differ from it only in
    shorter requests, or only in longer ones. Rows of zeros prove nothing: any read of unowned slots gives them.

    ``lens`` [T] int64: KV tokens of the request of each row.
    """
    known = mistake.answer.limit.isfinite().all(-1).all(-1)
    wrong = comparison.wrong.flatten(2).any(-1)
    near = _near(comparison, mistake).all(-1)
    where = _where_it_is_made(comparison, near | ~known, lens)
    if bool((known & ~near & wrong).any()) or where is None:
        return None
    telling = wrong & known & (mistake.answer.out.abs() > mistake.answer.limit).flatten(2).any(-1)
    shown = int(telling.sum()) >= _FEWEST_ROWS and 2 * int((wrong & known).sum()) >= int(wrong.sum())
    return where if shown else None


def _where_it_is_made(comparison: Comparison, near: torch.Tensor, lens: torch.Tensor) -> str | None:
    """The requests in which a backend makes a mistake for which all wrong rows are right: empty if right rows of wrong
    layers are right for it, too; the length from which on requests are wrong; None if no length separates them.

    ``near`` [L, T] bool: rows that are right for the mistake. ``lens`` [T] int64: KV tokens of each row's request.
    """
    wrong = comparison.wrong.flatten(2).any(-1)
    contradicting = (wrong.any(-1, keepdim=True) & ~wrong & ~near).any(0)
    if not bool(contradicting.any()):
        return ""
    right, made = lens[contradicting], lens[wrong.any(0)]
    if int(right.max()) < int(made.min()):
        return f", in requests of {int(made.min())} or more keys (requests of {int(right.max())} or fewer are right)"
    if int(right.min()) > int(made.max()):
        return f", in requests of {int(made.max())} or fewer keys (requests of {int(right.min())} or more are right)"
    return None


def _attended_keys(asked: Asked) -> Asked:
    evidence = asked.evidence
    # Probes name keys by the columns of the output: where columns are moved, they would name others.
    if asked.rerunner is None or moved_columns(evidence.comparison) is not None:
        return asked
    found = find_attended(asked.rerunner, evidence.schedule, evidence.comparison, in_graph=asked.in_graph)
    return replace(asked, evidence=replace(evidence, attended=found))


def _misrouted_rows(asked: Asked) -> Asked:
    evidence = asked.evidence
    found = find_misrouted(asked.rerunner, evidence.schedule, evidence.comparison, in_graph=asked.in_graph)
    return replace(asked, evidence=replace(evidence, misrouted=found))


def _named_patterns(asked: Asked) -> Asked:
    # A mistake that gives the numbers of every wrong row leaves nothing to look for.
    return asked if asked.texts else replace(asked, texts=tuple(hints(asked.evidence)))


_PUT: Mapping[Question, Callable[[Asked], Asked]] = {
    Question.ATTENDED_KEYS: _attended_keys,
    Question.MISROUTED_ROWS: _misrouted_rows,
    Question.NAMED_PATTERNS: _named_patterns,
}
"""Questions in the order in which they are put: later questions use what earlier ones found."""
