"""The table of a run that every front end and every report shows at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..results.case_result import RAN, CaseResult, Status, emulated_parts
from ..results.names import MODES

DIAGNOSIS = "diagnosis"
"""Name of the phase in ``CaseResult.seconds`` that looks for the cause of a failure."""


@dataclass(frozen=True)
class Row:
    """One backend, mode and execution."""

    backend: str
    mode: str
    execution: str
    counts: Mapping[Status, int]
    margin: float | None
    """Largest error / limit of the case-runs that passed."""
    seconds: float
    """Wall time without the time of diagnosis."""
    diagnosis: float
    """Wall time of diagnosis."""
    ran_on: str
    """The device: ``CUDA``, or what was emulated."""
    note: str = ""
    """The reason why a whole mode did not run."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """The largest value of each fact of ``CaseResult.memory``."""

    @property
    def planned(self) -> int:
        """Number of case-runs in this row."""
        return sum(self.counts.values())


def where_it_ran(results: Iterable[CaseResult]) -> str:
    """The device in words: ``CUDA``, ``emulated: device, graph``, or both if results differ."""
    labels: list[str] = []
    for result in results:
        if result.status not in RAN or not result.device:
            continue
        parts = emulated_parts(result)
        label = f"emulated: {', '.join(parts)}" if parts else "CUDA"
        if label not in labels:
            labels.append(label)
    return "; ".join(labels)


def seconds_of(result: CaseResult) -> float:
    """Wall time of one case-run."""
    return sum(result.seconds.values())


def rows(results: Iterable[CaseResult]) -> list[Row]:
    """Make one row per backend, mode and execution, in the order in which a server uses the modes.

    What is not declared has no row: ``not_declared_lines`` names it, on terminals and on pages.
    """
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        if result.case or result.status is not Status.UNSUPPORTED:
            groups.setdefault(result.place, []).append(result)
    backends = list(dict.fromkeys(backend for backend, _, _ in groups))

    def place(key: tuple[str, str, str]) -> tuple[int, int, str]:
        backend, mode, execution = key
        return backends.index(backend), MODES.index(mode) if mode in MODES else len(MODES), execution

    return [_row(key, groups[key]) for key in sorted(groups, key=place)]


def _row(key: tuple[str, str, str], group: Sequence[CaseResult]) -> Row:
    counts = Counter(r.status for r in group if r.case)
    margins = [r.margin for r in group if r.margin is not None and r.status is Status.PASSED]
    notes = [f"{r.status}: {r.reason}" if r.reason else str(r.status) for r in group if not r.case]
    return Row(
        *key,
        counts={status: counts[status] for status in Status if counts[status]},
        margin=max(margins, default=None),
        seconds=sum(seconds_of(result) - result.seconds.get(DIAGNOSIS, 0.0) for result in group),
        diagnosis=sum(result.seconds.get(DIAGNOSIS, 0.0) for result in group),
        ran_on=where_it_ran(group),
        note="; ".join(dict.fromkeys(notes)),
        memory={name: max(r.memory.get(name, 0) for r in group) for r in group for name in r.memory},
    )


def cells(results: Iterable[CaseResult]) -> list[list[str]]:
    """The table as cells, its headings first; empty without results.

    A column with the same value in every row is left out, such as the backend in a run of one backend, or the
    emulation, which the verdict names. So the table fits on a terminal and on a page.
    """
    groups = rows(results)
    if not groups:
        return []
    several = len({row.backend for row in groups}) > 1
    # An eager case-run has no graph that could be emulated.
    places = {row.ran_on.replace(", graph", "") for row in groups if row.ran_on}
    placed = len(places) > 1 or "CUDA" in places
    noted = any(row.note for row in groups)
    used = [status for status in Status if any(row.counts.get(status) for row in groups)]
    diagnosed = any(row.diagnosis for row in groups)
    grid = [
        [
            *(["backend"] if several else []),
            "mode",
            "execution",
            *(status.value for status in used),
            "margin",
            "seconds",
            *(["diagnosis"] if diagnosed else []),
            *(["ran on"] if placed else []),
            *(["note"] if noted else []),
        ]
    ]
    for row in groups:
        spent = [row.seconds, *([row.diagnosis] if diagnosed else [])]
        grid.append(
            [
                *([row.backend] if several else []),
                row.mode,
                row.execution,
                *(str(row.counts.get(status, "")) for status in used),
                "" if row.margin is None else f"{row.margin:.2f}",
                *(f"{each:.1f}" if row.counts else "" for each in spent),
                *([row.ran_on] if placed else []),
                *([row.note] if noted else []),
            ]
        )
    return grid


WORDS = ("backend", "mode", "execution", "ran on", "note")
"""Columns of the table that hold words and not numbers."""


def text_table(results: Iterable[CaseResult]) -> list[str]:
    """The table as plain lines of text."""
    grid = cells(results)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if heading in WORDS else cell.rjust(width)
            for heading, cell, width in zip(grid[0], line, widths, strict=True)
        ).rstrip()
        for line in grid
    ]
