"""Search for an earlier case-run that makes a later one in the same process fail.

A module global or a class attribute outlives an instance. A case-run that fails because of such a leftover passes when
it runs by itself, so its repro would pass. The search runs only after a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...results.case_result import CaseResult
from ...results.finding import Finding
from ...runner_modes.messages import RunCase

Fails = Callable[[Sequence[RunCase]], bool | None]
"""Function that is True if the case-run fails in a fresh process after the given case-runs, in their order. None: they
did not finish there."""
MOST_PREDECESSORS = 64
"""A search goes no further back."""

ENOUGH = 2
"""Number of failures of one kind (the same checks) that are repeated in a fresh process, which takes as long as a
worker's start. Later failures of that kind are assumed to be like these."""


@dataclass
class Afresh:
    """Results of repeating failures of a run in fresh processes."""

    wrong: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Kind of failure -> how often a fresh process failed, too."""
    right: Counter[str] = field(default_factory=Counter)
    """Backend -> failures that a fresh process did not have."""

    def asks(self, result: CaseResult) -> bool:
        """Report whether a failure of this kind is repeated in a fresh process."""
        return self.wrong[_kind(result)] < ENOUGH

    def searches(self, result: CaseResult) -> bool:
        """Report whether its cause is searched for further back than in the case-run before it."""
        return self.right[result.backend] < ENOUGH

    def note(self, result: CaseResult, fails: bool | None) -> None:
        """Remember whether a fresh process failed, too; None: the failure was not repeated."""
        if fails:
            self.wrong[_kind(result)] += 1
        elif fails is not None:
            self.right[result.backend] += 1


def _kind(result: CaseResult) -> tuple[str, ...]:
    return result.backend, *(finding.check for finding in result.findings)


def explained_by_what_was_kept(
    result: CaseResult, before: Sequence[RunCase], fails: Fails, *, search: bool = True
) -> CaseResult | None:
    """Return the result with the earlier case-run that causes it. None if the case-run also fails in a fresh process,
    or if the cause cannot be found. ``before``: earlier case-runs of the same process. ``search``: look further back
    than the case-run just before.
    """
    if not before or fails(()) is not False:
        return None
    for chosen in _candidates(before, search=search):
        if fails(chosen):
            return _with_hint(replace(result, after=tuple(map(named, chosen))), _kept(chosen))
    return _with_hint(result, _not_shown(len(before), tried=min(len(before), MOST_PREDECESSORS if search else 1)))


def named(request: RunCase) -> str:
    """The spelling of a case-run for ``repro --after``: ``eager:CASE``."""
    return f"{request.execution.value}:{request.case}"


def _candidates(before: Sequence[RunCase], *, search: bool) -> Iterator[Sequence[RunCase]]:
    """The last earlier case-run, the last two, the last four, ... and all."""
    count = 1
    while True:
        yield before[-count:]
        if not search or count >= min(len(before), MOST_PREDECESSORS):
            return
        count = min(2 * count, len(before))


def _kept(chosen: Sequence[RunCase]) -> str:
    which = f"after {named(chosen[0])}" if len(chosen) == 1 else f"after the {len(chosen)} case-runs that repro names"
    return (
        f"right in a fresh process, wrong {which}: something is kept in a module global or a class attribute, and "
        "outlives the instance"
    )


def _not_shown(count: int, tried: int) -> str:
    record = "the case-run" if tried == 1 else f"the {tried} case-runs"
    more = f" (of {count})" if count > tried else ""
    return (
        f"right in a fresh process, and there also after {record} before it{more}: probably it needs other "
        "state of the process, or it fails only sometimes; the repro below may pass"
    )


def _with_hint(result: CaseResult, hint: str) -> CaseResult:
    if not result.findings:
        return replace(result, reason=f"{result.reason}\n{hint}")
    first, *rest = result.findings
    hinted: Finding = replace(first, hint=f"{hint}\n{first.hint}".rstrip())
    return replace(result, findings=(hinted, *rest))
