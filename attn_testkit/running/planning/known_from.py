"""Entries for a file of known failures, made from the failures of a run."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ...registry import UsageError
from ...reports.grouping import group_failures
from ...reports.record import Report
from ...reports.verdict import conclude
from ...results.case_result import CaseResult, Status
from ...results.names import EXECUTIONS
from ...results.run_header import Selection
from .known_failures import ENDINGS, parse_known

MOST_OF_CAUSE = 100
"""Most characters of a cause in the comment above its entry."""
MOST_CAUSES = 3
"""Most causes in the comment above an entry."""


@dataclass(frozen=True)
class Entries:
    """The text of a file, and remarks on the failures that it leaves out."""

    text: str
    count: int
    remarks: tuple[str, ...]


def entries_from(
    results: Iterable[CaseResult],
    issue: str,
    until: datetime.date,
    today: datetime.date | None = None,
    record: str = "",
) -> Entries:
    """Make entries that cover each failure and no other case-run of the results.

    Case-runs of one mode that break the same checks share an entry: a glob if one covers all of them and nothing else,
    or the list of their ids. A comment has the causes of these failures. With ``record``, the results file that
    ``crashes_of`` makes, case-runs that crashed or timed out are quarantined. Raises ``UsageError`` for an issue or a
    date that no entry may have, and if nothing failed.
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
    entries: list[str] = []
    for group in _groups(failures):
        for execution, ids in _by_execution(group.rows):
            fields: dict[str, object] = {
                "cases": _globs(ids, _others(rows, group, execution)),
                **_kind(group.checks, record),
            }
            fields |= {"issue": issue, "until": until}
            fields |= {"backend": group.backend} if several else {}
            fields |= {"execution": execution} if execution else {}
            covered = [row for row in group.rows if row.case in ids and execution in ("", row.execution)]
            entries.append("\n".join([*_comment(covered), "[[known]]", *map(_field, fields.items()), ""]))
    text = "\n".join(entries)
    parse_known("the entries", text.replace(f"record = {json.dumps(record)}\n", ""), today)  # it may not exist yet
    return Entries(text, len(entries), tuple(remarks))


def crashes_of(report: Report) -> Report:
    """Make a results file of the case-runs that crashed or timed out: the ``record`` of a quarantine.

    Raises ``UsageError`` if nothing did.
    """
    rows = tuple(row for row in report.results if row.case and row.status.value in ENDINGS and not row.of_the_kit)
    if not rows:
        raise UsageError("nothing crashed or timed out, so there is nothing to quarantine; leave out --quarantine")
    of = report.header
    backends = {spec: text for spec, text in of.backends.items() if any(row.backend == spec for row in rows)}
    failing = {finding.check for row in rows for finding in row.findings}
    explained = {check: texts for check, texts in of.explained.items() if check in failing}
    selection = Selection(by=("what crashed or timed out",), of=of.selection.of or of.planned)
    header = replace(
        of, planned=len(rows), planned_in_all=0, plan="", backends=backends, selection=selection, explained=explained
    )
    return Report(header, rows, finished=True, exit_code=conclude(header, rows).code)


@dataclass(frozen=True)
class _Group:
    """Case-runs that share an entry, or one for each execution."""

    backend: str
    checks: tuple[str, ...]
    rows: tuple[CaseResult, ...]


def _checks_of(row: CaseResult) -> tuple[str, ...]:
    """The checks that an entry for this case-run names; empty if it did not fail."""
    if row.status is Status.FAILED:
        return tuple(dict.fromkeys(finding.check for finding in row.findings))
    return (row.status.value,) if row.status.value in ENDINGS else ()


def _groups(failures: Sequence[CaseResult]) -> list[_Group]:
    found: dict[tuple[str, str, tuple[str, ...]], list[CaseResult]] = {}
    for row in failures:
        found.setdefault((row.backend, row.mode, tuple(sorted(_checks_of(row)))), []).append(row)
    return [_Group(backend, checks, tuple(rows)) for (backend, _, checks), rows in found.items()]


def _by_execution(group: Sequence[CaseResult]) -> Iterator[tuple[str, list[str]]]:
    """Ids that fail in both executions, with an empty word; then those that fail in only one."""
    of = {execution: dict.fromkeys(row.case for row in group if row.execution == execution) for execution in EXECUTIONS}
    both = [case for case in of[EXECUTIONS[0]] if all(case in ids for ids in of.values())]
    if both:
        yield "", both
    for execution, ids in of.items():
        if alone := [case for case in ids if case not in both]:
            yield execution, alone


def _others(rows: Sequence[CaseResult], group: _Group, execution: str) -> set[str]:
    """Ids that an entry must not cover: case-runs to which it applies and that are not in the group."""
    mine = {(row.execution, row.case) for row in group.rows}
    return {
        row.case
        for row in rows
        if row.backend == group.backend and execution in ("", row.execution) and (row.execution, row.case) not in mine
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


def _kind(checks: Sequence[str], record: str) -> dict[str, object]:
    if record and checks[0] in ENDINGS:
        return {"kind": "quarantine", "record": record}
    return {"kind": "tolerated", "check": [*checks]}


def _field(named: tuple[str, object]) -> str:
    """One line of an entry, or one for each case of a list of cases."""
    name, value = named
    if isinstance(value, datetime.date):
        return f"{name} = {value}"
    if not isinstance(value, list) or len(value) == 1:
        return f"{name} = {json.dumps(value[0] if isinstance(value, list) else value)}"
    if name == "cases":
        return "\n".join(["cases = [", *(f"  {json.dumps(case)}," for case in value), "]"])
    return f"{name} = {json.dumps(value)}"


def _comment(rows: Sequence[CaseResult]) -> list[str]:
    """The causes of failures, as the lines of a comment."""
    causes = [
        "".join(letter if letter.isprintable() else " " for letter in group.cause) for group in group_failures(rows)
    ]
    lines = [text if len(text) <= MOST_OF_CAUSE else text[:MOST_OF_CAUSE].rsplit(" ", 1)[0] + " ..." for text in causes]
    more = len(lines) - MOST_CAUSES
    rest = [f"and {more} other cause{'s' * (more > 1)}"] if more > 0 else []
    return [f"# {line}" for line in (*lines[:MOST_CAUSES], *rest)]
