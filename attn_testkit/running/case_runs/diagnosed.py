"""Choice of the failures to diagnose: the first of each symptom, because a diagnosis takes as long as many case-runs.

A symptom is what a failure shows before anything is run again. Failures of one symptom mostly have one cause: a backend
with a single bug fails most of its cases. A later failure of a known symptom is assumed to be like the first one
(``CaseResult.like``). It is still diagnosed if its case lacks an option, such as a window, that the first case has:
then the hint cannot be about that option, so it names the cause of both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...cases.case import Case
from ...checks import NUMERIC
from ...contract import Execution
from ...diagnosis.changed_case import FEATURES
from ...results.finding import Finding
from ...runner_modes.messages import RunCase
from .between_cases import named

_LINE = re.compile(r"\S+:\d+ in \S")
"""Beginning of the ``where`` of an exception."""
_WHATEVER = ("data", "counts")
"""Features that every case has in some way."""


@dataclass(frozen=True)
class First:
    """A failure that was diagnosed."""

    name: str
    """``eager:CASE`` or ``graph:CASE``."""
    check: str
    """The check that the failure really breaks."""
    options: frozenset[str]


@dataclass
class Diagnosed:
    """Failures that a lane has diagnosed so far."""

    _firsts: dict[tuple[str, ...], list[First]] = field(default_factory=dict)
    _eager: dict[tuple[str, str], First] = field(default_factory=dict)
    """(backend, case) -> the failure that explains the wrong numbers of this case in eager mode."""
    _pending: tuple[tuple[str, ...], First] | None = None

    def like(self, backend: str, case: Case, execution: Execution, finding: Finding) -> First | None:
        """The diagnosed failure whose cause a new failure is assumed to have. ``finding``: the first finding of the new
        one, before diagnosis."""
        of_eager = self._eager.get((backend, case.id))
        if execution is Execution.GRAPH and of_eager and finding.check in NUMERIC:
            # A graph repeats what is wrong in eager.
            return of_eager
        known = self._firsts.get(self._symptom(backend, case, execution, finding))
        if known and execution is Execution.EAGER and finding.check in NUMERIC:
            self._eager[backend, case.id] = known[-1]
        return known[-1] if known else None

    def tells_more(self, backend: str, case: Case, execution: Execution, finding: Finding) -> bool:
        """Report whether a failure that is like another one is still diagnosed."""
        if execution is Execution.GRAPH and (backend, case.id) in self._eager and finding.check in NUMERIC:
            return False
        known = self._firsts.get(self._symptom(backend, case, execution, finding), ())
        return len(known) == 1 and not known[0].options <= _options(case)

    def note(self, backend: str, case: Case, execution: Execution, found: Finding, named_as: Finding) -> None:
        """Remember a failure that was diagnosed, until ``settle``. ``named_as``: its first finding after that."""
        first = First(named(RunCase(case.id, execution)), named_as.check, _options(case))
        self._pending = (self._symptom(backend, case, execution, found), first)
        if execution is Execution.EAGER and found.check in NUMERIC:
            self._eager[backend, case.id] = first

    def forget(self, backend: str, case: str) -> None:
        """Drop what is known of a case that is run again, since ``settle``."""
        self._pending = None
        self._eager.pop((backend, case), None)

    def settle(self, *, shown: bool) -> None:
        """Keep the failure that was noted last, if any. ``shown``: it does not depend on earlier case-runs."""
        if self._pending and shown:
            symptom, first = self._pending
            self._firsts.setdefault(symptom, []).append(first)
        self._pending = None

    @staticmethod
    def _symptom(backend: str, case: Case, execution: Execution, finding: Finding) -> tuple[str, ...]:
        if finding.check in NUMERIC:
            return backend, "numbers", execution.value
        # An exception is known by the author's line, whatever the phase and the execution.
        line = _LINE.match(finding.where)
        return (backend, finding.check, *((line[0],) if line else (case.mode.value, execution.value)))


def _options(case: Case) -> frozenset[str]:
    """Options that a case has and a minimal one lacks."""
    options = {name for name, without in FEATURES.items() if name not in _WHATEVER and _differs(case, name)}
    return frozenset(options | set(case.variants) | ({"KV splits"} if case.kv_splits else set()))


def _differs(case: Case, name: str) -> bool:
    try:
        return FEATURES[name](case) != case
    except ValueError:
        return True  # without it the case does not exist
