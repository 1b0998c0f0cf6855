"""Whether a case-run failed for what an earlier one left in its process, and which one that was.

A module global or a class attribute outlives an instance. A case-run that is wrong for it is right when it is run
alone, so its repro would pass. Asked only after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...results import CaseResult, Finding
from ...runner_modes.messages import DriveCase

__all__ = ["Fails", "explained_by_what_was_kept", "named"]

Fails = Callable[[Sequence[DriveCase]], bool | None]
"""Whether the case-run fails in a fresh process after these, in this order; None: they did not come to an end there."""
MOST_PREDECESSORS = 64
"""A search goes no further back."""


def explained_by_what_was_kept(
    result: CaseResult, before: Sequence[DriveCase], fails: Fails, *, search: bool = True
) -> CaseResult | None:
    """The result with what is found out; None where the case-run is wrong in a fresh process too, or nobody can tell.

    ``before``: what the same process had driven until then. ``search``: further back than the one before.
    """
    if not before or fails(()) is not False:
        return None
    for chosen in _candidates(before, search=search):
        if fails(chosen):
            return _with_hint(replace(result, after=tuple(map(named, chosen))), _kept(chosen))
    return _with_hint(result, _not_shown(len(before), tried=min(len(before), MOST_PREDECESSORS if search else 1)))


def named(request: DriveCase) -> str:
    """As ``repro --after`` takes it: ``eager:CASE``."""
    return f"{request.execution.value}:{request.case}"


def _candidates(before: Sequence[DriveCase], *, search: bool) -> Iterator[Sequence[DriveCase]]:
    """The one before, the two, the four, ... and all."""
    count = 1
    while True:
        yield before[-count:]
        if not search or count >= min(len(before), MOST_PREDECESSORS):
            return
        count = min(2 * count, len(before))


def _kept(chosen: Sequence[DriveCase]) -> str:
    which = f"after {named(chosen[0])}" if len(chosen) == 1 else f"after the {len(chosen)} case-runs that repro names"
    return (
        f"right in a fresh process, wrong {which}: something is kept in a module global or a class attribute, and "
        "outlives the instance"
    )


def _not_shown(count: int, tried: int) -> str:
    driven = "the case-run" if tried == 1 else f"the {tried} case-runs"
    more = f" (of {count})" if count > tried else ""
    return (
        f"right in a fresh process, and there also after {driven} before it{more}: something of the process is kept "
        "that this does not bring back, or it fails now and then; the repro below may pass"
    )


def _with_hint(result: CaseResult, hint: str) -> CaseResult:
    if not result.findings:
        return replace(result, reason=f"{result.reason}\n{hint}")
    first, *rest = result.findings
    hinted: Finding = replace(first, hint=f"{hint}\n{first.hint}".rstrip())
    return replace(result, findings=(hinted, *rest))
