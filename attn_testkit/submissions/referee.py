"""The referee of submissions. It reads an archive, runs nothing, and says why it refuses it.

It finds cuts, skips, and edits that nobody disguised. A program that can write an archive can also write all of its
digests: to be sure, run the profile again.
"""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Callable, Iterator
from itertools import product

from ..distributions import digest_of_kit
from ..profiles import profile_names, read_profile
from ..results.case_result import RAN, CaseResult, Status, emulated_parts
from ..results.names import EXECUTIONS, mode_of
from .archive import Submission, facts_of

__all__ = ["refusals"]

Refusals = Iterator[str]


def refusals(found: Submission, today: datetime.date | None = None, *, in_the_past: bool = False) -> list[str]:
    """Reasons to refuse a submission, each in one line: what is wrong, what was expected, what to do. ``in_the_past``
    also accepts the code of other kits, and entries whose day is over now.
    """
    for stage in _STAGES:
        if in_the_past and _another_kit in stage:
            continue
        # A submission for another kit or profile would be wrong in each later line, too.
        if reasons := [reason for check in stage for reason in check(found)]:
            return reasons
    return [] if in_the_past else list(_expired(found, today or datetime.datetime.now(datetime.UTC).date()))


def _changed_files(found: Submission) -> Refusals:
    listed = found.manifest.get("files")
    if listed != dict(found.digests):
        names = {*found.digests} | {*(listed if isinstance(listed, dict) else ())}
        wrong = sorted(name for name in names if not listed or listed.get(name) != found.digests.get(name))
        yield f"{', '.join(wrong)} is not as the manifest says: it was changed, added or removed; submit the run again"


def _changed_facts(found: Submission) -> Refusals:
    for name, value in facts_of(found.header).items():
        if (said := found.manifest.get(name)) != value:
            yield f"the manifest says {name} {said!r}, and the results say {value!r}; submit the run again"


def _another_profile(found: Submission) -> Refusals:
    name, digest = found.header.tier, found.header.profile
    if not digest or name not in profile_names():
        known = ", ".join(profile_names())
        yield f"the run is of {name}, which is not a profile of this kit; run one of {known} with --profile"
    elif digest != read_profile(name).digest:
        yield (
            f"profile {name} has digest {digest} in the run, and {read_profile(name).digest} in this kit: its cases "
            "were changed; run the profile again with an unchanged kit"
        )


def _another_kit(found: Submission) -> Refusals:
    here = importlib.metadata.version("attn-testkit")
    if found.header.kit != here:
        yield f"the run is of attn-testkit {found.header.kit}, and this is {here}; verify it with that version"
    elif found.header.kit_digest != digest_of_kit():
        yield (
            f"the code of attn-testkit {here} has digest {digest_of_kit()} here, and {found.header.kit_digest} in the "
            "run: one of the two was changed; run and verify with the released kit"
        )


def _unfinished(found: Submission) -> Refusals:
    if not found.report.finished or found.report.interrupted:
        yield "the run did not end; run the profile again, or the rest of it with --rest-of"
    for problem in found.report.problems:
        yield f"the run itself failed: {problem}"
    if "--in-process" in found.header.command.split():
        yield "the run was --in-process, where the backend can change its own verdict; run it without"
    if len(found.header.backends) != 1:
        yield f"the run is of {len(found.header.backends)} backends; submit one for each"


def _cut(found: Submission) -> Refusals:
    if found.header.selection:
        by = ", ".join(found.header.selection.by)
        yield f"the run is a part of the profile, selected by {by}; run all of it"
    cases = read_profile(found.header.tier).cases
    rows = found.report.results
    whole = {(row.mode, row.execution) for row in rows if not row.case and row.status is Status.UNSUPPORTED}
    due = {
        (execution, case) for execution, case in product(EXECUTIONS, cases) if (mode_of(case), execution) not in whole
    }
    have = {(row.execution, row.case) for row in rows if row.case}
    if missing := sorted(due - have):
        yield f"{_listed(missing)} of the profile have no result; run the whole profile"
    if others := sorted(each for each in have if each[1] not in cases):
        yield f"{_listed(others)} are not of the profile; run only the profile"


def _empty(found: Submission) -> Refusals:
    if not any(row.status in RAN or row.status is Status.QUARANTINED for row in found.report.results if row.case):
        yield "no case of the profile ran: the backend declares none of them; declare more, or run another profile"


def _skipped(found: Submission) -> Refusals:
    skipped = [row for row in found.report.results if row.status is Status.NOT_RUN_HERE]
    for reason in dict.fromkeys(row.reason for row in skipped):
        places = [(row.execution, row.case or row.mode) for row in skipped if row.reason == reason]
        yield f"{_listed(places)} were skipped: {reason}; run them on a machine that can"


def _unjudged(found: Submission) -> Refusals:
    rows = found.report.results
    if broken := [(row.execution, row.case) for row in rows if row.of_the_kit]:
        yield f"the kit itself failed in {_listed(broken)}; report it, and run the profile again"
    if empty := [(row.execution, row.case) for row in rows if row.status is Status.PASSED and not row.checks]:
        yield f"{_listed(empty)} passed without a check; the results were edited: run the profile again"


def _without_an_entry(found: Submission) -> Refusals:
    excused = (Status.KNOWN_FAILURE, Status.QUARANTINED)
    free = [row for row in found.report.results if row.status in excused and not _has_entry(found, row)]
    if free:
        names = _listed([(row.execution, row.case) for row in free])
        yield f"{names} are known failures without an entry in the submission; submit with --known-failures FILE"


def _has_entry(found: Submission, row: CaseResult) -> bool:
    kinds = {"quarantine"} if row.status is Status.QUARANTINED else {"tolerated", "flaky"}
    covering = [
        each for each in found.known if each.kind in kinds and each.covers(row.backend, row.execution, row.case)
    ]
    allowed = {check for entry in covering for check in entry.checks}
    return bool(covering) and (row.status is Status.QUARANTINED or {each.check for each in row.findings} <= allowed)


def _expired(found: Submission, today: datetime.date) -> Refusals:
    for name in dict.fromkeys(entry.name for entry in found.known if entry.expired(today)):
        yield f"{name} has expired; fix the failure, or look at it again and give the entry a new date"


def _emulated(found: Submission) -> Refusals:
    emulated = [row for row in found.report.results if row.status in RAN and row.emulated]
    if found.on_hardware and emulated:
        parts = ", ".join(sorted({part for row in emulated for part in emulated_parts(row)}))
        names = _listed([(row.execution, row.case) for row in emulated])
        yield f"it names a real device, and {names} ran with an emulated {parts}; run them on the device"


def _listed(places: list[tuple[str, str]]) -> str:
    """The first of some case-runs, and the number of the others."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{' '.join(places[0])}{more}"


_STAGES: tuple[tuple[Callable[[Submission], Refusals], ...], ...] = (
    (_changed_files, _changed_facts),
    (_another_profile,),
    (_another_kit,),
    (_unfinished, _cut, _empty, _skipped, _unjudged, _without_an_entry, _emulated),
)
