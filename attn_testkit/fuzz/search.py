"""The search: random cases until the time is up; one failure per mode and check, minimized."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import hypothesis
from hypothesis import strategies as st

from ..cases.case import Case, parse_case
from ..catalogue.minimal import minimal_case
from ..contract import Capabilities, Execution, ForwardMode
from ..results.case_result import BAD, CaseResult, Status, failed_check
from .strategies import differences, random_cases

Pair = tuple[Case, str]
"""A case and its execution."""
Kind = tuple[str, str]
"""Mode, and the first failed check or the status: failures of a kind are assumed to have one cause."""
_EXAMPLES_OF_A_SEARCH = 1_000_000


class TimeUp(BaseException):
    """The time or the number of case-runs is up. It is not an ``Exception``, which Hypothesis would treat as a
    failure."""


class _Failed(Exception):
    """A case-run of the kind that the search is minimizing."""


@dataclass
class Found:
    """A failure, with the smallest case-run found so far."""

    kind: Kind
    first: CaseResult
    smallest: CaseResult
    odd: tuple[str, ...]
    """Fields in which the smallest case differs from the minimal one."""


@dataclass
class Search:
    """The search for one backend. ``run`` runs and evaluates a case-run, whatever the backend does."""

    declared: Capabilities
    modes: Sequence[ForwardMode]
    executions: Sequence[Execution]
    run: Callable[[Case, str], CaseResult]
    explain: Callable[[Case, str], CaseResult]
    """Like ``run``, with a diagnosis: called for the first case-run of each kind of failure, and for the smallest."""
    seed: int
    seconds: float
    """Time limit, counted from ``begin``."""
    most: int | None = None
    """Limit on the number of case-runs."""
    on_result: Callable[[CaseResult, Found | None], None] = lambda result, found: None
    """Called with each new case-run, and with the failure that is being minimized."""
    on_smaller: Callable[[Found], None] = lambda found: None
    clock: Callable[[], float] = time.monotonic
    found: dict[Kind, Found] = field(default_factory=dict)
    runs: int = 0
    _results: dict[tuple[str, str], CaseResult] = field(default_factory=dict)
    _told: set[Kind] = field(default_factory=set)
    """Kinds whose smallest case-run has its diagnosis."""
    _until: float = 0.0

    def begin(self) -> None:
        """Start the clock of the time limit."""
        self._until = self.clock() + self.seconds

    def again(self, pairs: Sequence[tuple[str, str]]) -> Iterator[CaseResult]:
        """Run earlier failures, pairs (execution, case id), again. Raises ``TimeUp``."""
        for execution, case in pairs:
            result = self._result(parse_case(case), execution, None)
            if result.status in BAD:
                self._note(result)
            yield result

    def go_on(self) -> None:
        """Search until the time is up, for one new kind of failure after another."""
        with contextlib.suppress(TimeUp):
            round_ = 0
            while self._search(round_):
                self._explain_smallest()
                round_ += 1
        self._explain_smallest()

    def _search(self, round_: int) -> Found | None:
        """The next kind of failure, minimized; None if there are no more cases to draw."""
        target: list[Found] = []

        def body(pair: Pair) -> None:
            result = self._result(*pair, target[0] if target else None)
            if result.status not in BAD:
                return
            kind = _kind(result)
            if not target and kind not in self.found:
                target.append(self._note(result))
            if target and kind == target[0].kind:
                self._keep_smaller(target[0], result)
                raise _Failed

        with contextlib.suppress(_Failed):
            self._hypothesis(body, round_)
        return target[0] if target else None

    def _hypothesis(self, body: Callable[[Pair], None], round_: int) -> None:
        settings = hypothesis.settings(
            max_examples=_EXAMPLES_OF_A_SEARCH,
            database=None,
            deadline=None,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
            report_multiple_bugs=False,
            print_blob=False,
        )
        # The seed of each round follows only from the user's: with --runs the same cases come in the same order.
        hypothesis.seed(f"{self.seed}:{round_}")(settings(hypothesis.given(self._pairs())(body)))()

    def _pairs(self) -> st.SearchStrategy[Pair]:
        options: list[st.SearchStrategy[Pair]] = []
        for mode in self.modes:
            executions = [e.value for e in self.executions if self.declared.offers(mode, e)]
            if executions:
                options.append(st.tuples(random_cases(self.declared, mode), st.sampled_from(executions)))
        return st.one_of(options)

    def _result(self, case: Case, execution: str, making_small: Found | None) -> CaseResult:
        """The case-run's result; no case-run runs twice."""
        key = (execution, case.id)
        if key not in self._results:
            if self.clock() >= self._until or (self.most is not None and self.runs >= self.most):
                raise TimeUp
            result = self.run(case, execution)
            if not making_small and result.status in BAD and _kind(result) not in self.found:
                result = self._explained(result)
            self._results[key] = result
            self.runs += 1
            self.on_result(self._results[key], making_small)
        return self._results[key]

    def _note(self, result: CaseResult) -> Found:
        kind = _kind(result)
        found = Found(kind, result, result, self._odd(result))
        known = self.found.setdefault(kind, found)
        if known is found:
            self.on_smaller(found)
        return known

    def _keep_smaller(self, found: Found, result: CaseResult) -> None:
        odd = self._odd(result)
        if (len(odd), len(result.case), result.case) < (len(found.odd), len(found.smallest.case), found.smallest.case):
            found.smallest, found.odd = result, odd
            self.on_smaller(found)

    def _explain_smallest(self) -> None:
        for found in self.found.values():
            if found.smallest is not found.first and found.kind not in self._told:
                found.smallest = self._explained(found.smallest)
                self._told.add(found.kind)

    def _explained(self, result: CaseResult) -> CaseResult:
        """The failure with a diagnosis; unchanged if a repeated run does not fail in the same way."""
        if result.status is not Status.FAILED:
            return result
        again = self.explain(parse_case(result.case), result.execution)
        return again if again.status in BAD and _kind(again) == _kind(result) else result

    def _odd(self, result: CaseResult) -> tuple[str, ...]:
        case = parse_case(result.case)
        return tuple(differences(case, minimal_case(self.declared, case.mode)))


def _kind(result: CaseResult) -> Kind:
    return result.mode, failed_check(result)
