"""Tables of each backend's modes and executions by check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..results.case_result import RAN, CaseResult, Status, emulated_parts


@dataclass(frozen=True)
class CheckCell:
    """Numbers of case-runs for one check in one mode and execution."""

    evaluated: int
    failed: int
    not_evaluated: int
    """Number of case-runs in which it applies and could not be evaluated."""

    @property
    def kind(self) -> str:
        """The CSS class and mark: ``failed``, ``kept``, ``untested`` or ``none`` (it does not apply)."""
        return "failed" if self.failed else "kept" if self.evaluated else "untested" if self.not_evaluated else "none"


@dataclass(frozen=True)
class CheckRow:
    """The cells of one mode and execution, one per check."""

    mode: str
    execution: str
    cells: tuple[CheckCell, ...]
    lost: int
    """Number of case-runs that crashed or timed out before their checks could be evaluated."""
    emulated: tuple[str, ...]


@dataclass(frozen=True)
class CheckMatrix:
    """The checks of one backend."""

    backend: str
    checks: tuple[str, ...]
    rows: tuple[CheckRow, ...]

    @property
    def failed(self) -> int:
        """Number of checks that failed anywhere."""
        return sum(any(row.cells[index].failed for row in self.rows) for index in range(len(self.checks)))


def check_matrices(runs: Sequence[CaseResult]) -> list[CheckMatrix]:
    """Make a matrix for each backend that ran."""
    groups: dict[str, dict[tuple[str, str], list[CaseResult]]] = {}
    for result in runs:
        if result.status in RAN:
            rows = groups.setdefault(result.backend, {})
            rows.setdefault((result.mode, result.execution), []).append(result)
    found = []
    for backend, rows in groups.items():
        checks = reading_order([result for group in rows.values() for result in group])
        if checks:
            found.append(CheckMatrix(backend, checks, tuple(_check_row(*key, rows[key], checks) for key in rows)))
    return found


def reading_order(results: Iterable[CaseResult]) -> tuple[str, ...]:
    """Sort ids in the order in which results list them, the longest list first.

    A page then needs no table of checks, and can show the checks of another version of the kit.
    """
    lists = {
        kind for result in results for kind in (result.checks, result.not_evaluated, tuple(sorted(_failed(result))))
    }
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


def _check_row(mode: str, execution: str, group: Sequence[CaseResult], checks: Sequence[str]) -> CheckRow:
    evaluated = Counter(check for result in group for check in {*result.checks, *_failed(result)})
    failed = Counter(check for result in group for check in _failed(result))
    not_evaluated = Counter(check for result in group for check in {*result.not_evaluated} - _failed(result))
    return CheckRow(
        mode,
        execution,
        tuple(CheckCell(evaluated[check], failed[check], not_evaluated[check]) for check in checks),
        lost=sum(result.status in (Status.CRASHED, Status.TIMED_OUT) for result in group),
        emulated=tuple(sorted({part for result in group for part in emulated_parts(result)})),
    )
