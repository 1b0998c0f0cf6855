"""The table of a run that every front end and every report shows at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..results import MODES, RAN, CaseResult, Status, emulated_parts

__all__ = ["Row", "rows", "seconds_of", "text_table", "where_it_ran"]


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
    ran_on: str
    """The device: ``CUDA``, or what was emulated."""
    note: str = ""
    """The reason why a whole mode did not run."""

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
    """Make one row per backend, mode and execution, in the order in which a server uses the modes."""
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.backend, result.mode, result.execution), []).append(result)
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
        seconds=sum(map(seconds_of, group)),
        ran_on=where_it_ran(group),
        note="; ".join(dict.fromkeys(notes)),
    )


def text_table(results: Iterable[CaseResult]) -> list[str]:
    """The table as plain lines of text."""
    groups = rows(results)
    used = [status for status in Status if any(row.counts.get(status) for row in groups)]
    grid = [["backend", "mode", "execution", *(s.value for s in used), "margin", "seconds", "ran on"]]
    for row in groups:
        margin = "" if row.margin is None else f"{row.margin:.2f}"
        seconds = f"{row.seconds:.1f}" if row.counts else ""
        place = "; ".join(filter(None, (row.ran_on, row.note)))
        counts = [str(row.counts.get(s, "")) for s in used]
        grid.append([row.backend, row.mode, row.execution, *counts, margin, seconds, place])
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    numbers = range(3, 5 + len(used))
    return [
        "  ".join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in grid
    ]
