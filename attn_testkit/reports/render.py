"""A record as a page that needs nothing else, and as a summary for a CI job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jinja2

from ..results import (
    BAD,
    RAN,
    CaseResult,
    Finding,
    RunHeader,
    Status,
    emulated_parts,
    format_failure,
    repro_command,
    untried_lines,
)
from .outcome import verdict
from .record import Report
from .tally import rows, seconds_of

__all__ = ["html_page", "markdown_summary"]

MOST_FAILURES = 200
"""Failures that a page shows; the record has them all."""
MOST_IN_SUMMARY = 10
TOP = 8


@dataclass(frozen=True)
class Cell:
    """One check in one mode and execution; in case-runs."""

    judged: int
    failed: int
    not_judged: int
    """It applies, and could not be judged."""

    @property
    def kind(self) -> str:
        """``failed``, ``kept``, ``unjudged`` or ``none`` (it does not apply): the CSS class, and the mark."""
        return "failed" if self.failed else "kept" if self.judged else "unjudged" if self.not_judged else "none"


@dataclass(frozen=True)
class MatrixRow:
    """A mode and execution against every check."""

    mode: str
    execution: str
    cells: tuple[Cell, ...]
    lost: int
    """Case-runs that crashed or timed out, and so judged nothing."""
    emulated: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """Checks of one backend."""

    backend: str
    checks: tuple[str, ...]
    rows: tuple[MatrixRow, ...]


@dataclass(frozen=True)
class Failure:
    """One case-run that did not pass."""

    result: CaseResult
    title: str
    repro: str
    emulated: tuple[str, ...]
    other: CaseResult | None = None
    """The other execution of the case, which did not pass either and is shown here too."""
    other_repro: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What it failed."""
        return self.result.findings

    @property
    def other_findings(self) -> tuple[Finding, ...]:
        """What the other execution failed and this one did not."""
        own = _failed(self.result)
        return tuple(f for f in self.other.findings if f.check not in own) if self.other else ()

    @property
    def other_same(self) -> tuple[Finding, ...]:
        """What both failed, as the other execution has it."""
        own = _failed(self.result)
        return tuple(f for f in self.other.findings if f.check in own) if self.other else ()


def html_page(report: Report) -> str:
    """The whole page as text."""
    return _environment(autoescape=True).get_template("report.html.j2").render(_model(report))


def markdown_summary(report: Report) -> str:
    """The summary as Markdown."""
    return _environment(autoescape=False).get_template("report.md.j2").render(_model(report))


def _environment(*, autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attn_testkit.reports", "."),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _markdown_cell
    return environment


def _markdown_cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _model(report: Report) -> dict[str, object]:
    results = report.results
    runs = [result for result in results if result.case]
    counts = Counter(result.status for result in runs)
    bad = [result for result in runs if result.status in BAD]
    groups = rows(results)
    return {
        "report": report,
        "header": report.header,
        "verdict": _verdict(report),
        "good": report.exit_code == 0 and report.finished,
        "counts": [(status, counts[status]) for status in Status if counts[status]],
        "total": max(1, sum(counts.values())),
        "emulated": sorted({part for result in runs for part in emulated_parts(result)}),
        "failures": _failures(bad[:MOST_FAILURES], report.header),
        "shown_runs": min(len(bad), MOST_FAILURES),
        "short_failures": [format_failure(result, report.header) for result in bad[:MOST_IN_SUMMARY]],
        "bad": len(bad),
        "known": [result for result in runs if result.status in (Status.KNOWN_FAILURE, Status.QUARANTINED)],
        "matrices": _matrices(runs),
        "rows": groups,
        "used": [status for status in Status if any(row.counts.get(status) for row in groups)],
        "bad_statuses": BAD,
        "hints": Counter(hint for result in results for hint in result.hints).most_common(),
        "tightest": _tightest(runs),
        "slowest": sorted(runs, key=seconds_of, reverse=True)[:TOP],
        "seconds_of": seconds_of,
        "emulated_parts": emulated_parts,
        "untried": untried_lines(report.header.untried),
        "row_seconds": sum(row.seconds for row in groups),
    }


def _verdict(report: Report) -> str:
    text = verdict(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    return text if report.finished or report.interrupted else f"UNFINISHED: the run was cut off; until then: {text}"


def _failures(bad: Sequence[CaseResult], header: RunHeader) -> list[Failure]:
    """Eager and graph of a case that both fail are one entry: mostly it is one bug, and eager shows it plainest."""
    found: dict[tuple[str, str], Failure] = {}
    for result in bad:
        key = (result.backend, result.case)
        if key in found:
            found[key] = replace(found[key], other=result, other_repro=repro_command(result, header))
        else:
            found[key] = _failure(result, header)
    return list(found.values())


def _failure(result: CaseResult, header: RunHeader) -> Failure:
    title = (
        result.findings[0].headline if result.findings else f"{result.status}: {result.reason.partition(chr(10))[0]}"
    )
    return Failure(result, title, repro_command(result, header), tuple(emulated_parts(result)))


def _matrices(runs: Sequence[CaseResult]) -> list[Matrix]:
    found = []
    for backend in dict.fromkeys(result.backend for result in runs):
        own = [result for result in runs if result.backend == backend and result.status in RAN]
        checks = _reading_order(own)
        keys = dict.fromkeys((result.mode, result.execution) for result in own)
        found.append(Matrix(backend, checks, tuple(_matrix_row(own, checks, *key) for key in keys)))
    return [matrix for matrix in found if matrix.checks]


def _reading_order(results: Sequence[CaseResult]) -> tuple[str, ...]:
    """All ids in the order in which results list theirs, the fullest list first.

    So a page needs no table of checks, which comes with torch, and knows those of another version of the kit.
    """
    lists = {kind for result in results for kind in (result.checks, result.not_judged, tuple(sorted(_failed(result))))}
    order: list[str] = []
    for ids in sorted(lists, key=lambda ids: (-len(ids), ids)):
        place = len(order)
        for check in reversed(ids):
            if check in order:
                place = order.index(check)
            else:
                order.insert(place, check)
    return tuple(order)


def _failed(result: CaseResult) -> set[str]:
    return {finding.check for finding in result.findings}


def _matrix_row(own: Sequence[CaseResult], checks: Sequence[str], mode: str, execution: str) -> MatrixRow:
    group = [result for result in own if (result.mode, result.execution) == (mode, execution)]
    judged = Counter(check for result in group for check in {*result.checks, *_failed(result)})
    failed = Counter(check for result in group for check in _failed(result))
    not_judged = Counter(check for result in group for check in {*result.not_judged} - _failed(result))
    return MatrixRow(
        mode,
        execution,
        tuple(Cell(judged[check], failed[check], not_judged[check]) for check in checks),
        lost=sum(result.status in (Status.CRASHED, Status.TIMED_OUT) for result in group),
        emulated=tuple(sorted({part for result in group for part in emulated_parts(result)})),
    )


def _tightest(runs: Sequence[CaseResult]) -> list[CaseResult]:
    passed = [result for result in runs if result.status is Status.PASSED and result.margin is not None]
    return sorted(passed, key=lambda result: result.margin or 0.0, reverse=True)[:TOP]
