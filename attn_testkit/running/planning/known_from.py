"""Entries for a file of known failures, made of the failures of a run."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...registry import UsageError
from ...results.case_result import CaseResult, Status
from ...results.names import EXECUTIONS
from .known_failures import ENDINGS, parse_known

__all__ = ["Entries", "entries_from"]


@dataclass(frozen=True)
class Entries:
    """The text of a file, and remarks on what it leaves out."""

    text: str
    count: int
    remarks: tuple[str, ...]


def entries_from(
    results: Iterable[CaseResult], issue: str, until: datetime.date, today: datetime.date | None = None
) -> Entries:
    """Make entries that cover each failure and no other case-run of the results.

    Case-runs that break the same checks share an entry if a glob covers all of them and nothing else. Raises
    ``UsageError`` for an issue or a date that no entry may have, and if nothing failed.
    """
    rows = [row for row in results if row.case and row.status is not Status.UNSUPPORTED]
    failures = [row for row in rows if _checks_of(row) and not row.of_the_kit]
    remarks = [
        f"{count} {what}"
        for count, what in (
            (sum(row.of_the_kit for row in rows), "errors of the kit itself: no entry excuses them"),
            (
                sum(row.status is Status.UNEXPECTEDLY_PASSED for row in rows),
                "unexpectedly passed: narrow their entries",
            ),
            (sum(row.status is Status.KNOWN_FAILURE for row in rows), "known failures: their entries exist"),
        )
        if count
    ]
    if not failures:
        raise UsageError("; ".join(["nothing failed that an entry could excuse", *remarks]))
    several = len({row.backend for row in rows}) > 1
    entries = [
        _entry(glob, checks, issue, until, backend if several else "", execution)
        for (backend, checks), group in _groups(failures).items()
        for execution, ids in _by_execution(group)
        for glob in _globs(ids, _others(rows, group, backend, execution))
    ]
    text = "\n".join(entries)
    parse_known("--from", text, today)
    return Entries(text, len(entries), tuple(remarks))


def _checks_of(row: CaseResult) -> tuple[str, ...]:
    """The checks that an entry for it names; empty if it did not fail."""
    if row.status is Status.FAILED:
        return tuple(dict.fromkeys(finding.check for finding in row.findings))
    return (row.status.value,) if row.status.value in ENDINGS else ()


def _groups(failures: Sequence[CaseResult]) -> dict[tuple[str, tuple[str, ...]], list[CaseResult]]:
    found: dict[tuple[str, tuple[str, ...]], list[CaseResult]] = {}
    for row in failures:
        found.setdefault((row.backend, tuple(sorted(_checks_of(row)))), []).append(row)
    return found


def _by_execution(group: Sequence[CaseResult]) -> Iterator[tuple[str, list[str]]]:
    """Ids that fail in both executions with an empty word, then those of each by itself."""
    of = {execution: dict.fromkeys(row.case for row in group if row.execution == execution) for execution in EXECUTIONS}
    both = [case for case in of[EXECUTIONS[0]] if all(case in ids for ids in of.values())]
    if both:
        yield "", both
    for execution, ids in of.items():
        if alone := [case for case in ids if case not in both]:
            yield execution, alone


def _others(rows: Sequence[CaseResult], group: Sequence[CaseResult], backend: str, execution: str) -> set[str]:
    """Ids that an entry must not cover: case-runs that it holds for and that are not of the group."""
    mine = {(row.execution, row.case) for row in group}
    return {
        row.case
        for row in rows
        if row.backend == backend and execution in ("", row.execution) and (row.execution, row.case) not in mine
    }


def _globs(ids: Sequence[str], others: Iterable[str]) -> list[str]:
    """One glob for all ids if it matches none of the others, else the ids themselves."""
    if len(ids) == 1:
        return [*ids]
    common = ids[0].split("-")
    for case in ids[1:]:
        common = _shared(common, case.split("-"))
    if not common or not all(case.startswith(f"{common[0]}-") for case in ids):
        return [*ids]
    glob = "-*".join(common) + "*"
    fits = all(fnmatchcase(case, glob) for case in ids) and not any(fnmatchcase(case, glob) for case in others)
    return [glob] if fits else [*ids]


def _shared(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The longest common subsequence of two ids' words."""
    best: list[list[list[str]]] = [[[] for _ in range(len(second) + 1)] for _ in range(len(first) + 1)]
    for i, left in enumerate(first):
        for j, right in enumerate(second):
            longer = max(best[i][j + 1], best[i + 1][j], key=len)
            best[i + 1][j + 1] = [*best[i][j], left] if left == right else longer
    return best[-1][-1]


def _entry(glob: str, checks: Sequence[str], issue: str, until: datetime.date, backend: str, execution: str) -> str:
    named = checks[0] if len(checks) == 1 else list(checks)
    fields = {"cases": glob, "kind": "tolerated", "check": named, "issue": issue, "until": until}
    fields |= {"backend": backend} if backend else {}
    fields |= {"execution": execution} if execution else {}
    lines = [
        f"{key} = {value if isinstance(value, datetime.date) else json.dumps(value)}" for key, value in fields.items()
    ]
    return "\n".join(["[[known]]", *lines, ""])
