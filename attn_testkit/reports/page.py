"""The content of an HTML report: everything that the template needs, counted, grouped and shortened."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ..results.case_result import BAD, RAN, CaseResult, Status, emulated_parts, remarks_of
from ..results.failure_text import repro_command
from ..results.names import MODES
from ..results.remarks import (
    excluded_lines,
    launch_lines,
    left_lines,
    not_covered_lines,
    not_declared_lines,
    note_lines,
    printed_lines,
    repeated_lines,
)
from .check_matrix import check_matrices
from .compare import compare_reports
from .covered import COLUMNS, covered
from .grouping import Group, group_failures
from .history import Age, History, Night, age_of, key_of, night_of
from .in_common import in_common
from .outcome import verdict
from .overview import is_emulated, overviews
from .plots import margin_plot, nights_plot
from .record import Report
from .tally import rows, seconds_of

MOST_CARDS = 150
"""Number of causes that have a card; the others have one line each."""
MOST_IN_FULL = 200
"""Number of failing case-runs that a page shows in full."""
MOST_OF_A_CAUSE = 10
"""Number of failing case-runs of one cause that a page shows in full."""
MOST_NAMED = 25
"""Number of further case-runs of one cause that have one line each; the list of all case-runs has the rest."""
MOST_LINES = 100
"""Number of lines of a table."""
MOST_NIGHTS = 60
TOP = 8


@dataclass(frozen=True)
class FailedRun:
    """One case-run that did not pass."""

    number: int
    """Index among the case-runs of the results file, from 0."""
    result: CaseResult
    repro: str
    age: Age | None

    @property
    def headline(self) -> str:
        """The first line of the failure."""
        if self.result.findings:
            return self.result.findings[0].headline
        return f"{self.result.status}: {self.result.reason.partition(chr(10))[0]}"


@dataclass(frozen=True)
class Card:
    """A cause with its case-runs."""

    number: int
    group: Group
    new: int
    """Number of its case-runs that were not red before tonight."""
    age: Age | None
    """Age of the oldest of them."""
    shown: tuple[FailedRun, ...]
    """The case-runs that are shown in full."""
    named: tuple[FailedRun, ...]
    shared: str
    """Properties that all failing cases share and no passing case has; may be empty."""
    elsewhere: tuple[tuple[str, int], ...]
    """Pairs of backend and card number with the same cause and check."""

    @property
    def count(self) -> str:
        """Number of case-runs in words, as ``6 case-runs``."""
        count = len(self.group.results)
        return f"{count} case-run" + ("s" if count != 1 else "")

    @property
    def more(self) -> int:
        """Number of case-runs that are only in the list of all."""
        return len(self.group.results) - len(self.shown) - len(self.named)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Pairs of mode with execution, and number of case-runs."""
        return list(Counter(" ".join(r.place[1:]).strip() for r in self.group.results).items())

    @property
    def emulated(self) -> list[str]:
        """Names of what was emulated in any of them."""
        return sorted({part for result in self.group.results for part in emulated_parts(result)})


def cards(report: Report, nights: Sequence[Night]) -> list[Card]:
    """Make a card for each cause: those that are new tonight first, then the largest."""
    header = report.header

    numbers = {id(result): number for number, result in enumerate(r for r in report.results if r.case)}

    def failed(result: CaseResult) -> FailedRun:
        age = age_of(nights, key_of(result, header.seed))
        return FailedRun(numbers[id(result)], result, repro_command(result, header), age)

    found = []
    for group in group_failures(r for r in report.results if r.case and r.status in BAD):
        runs = [failed(result) for result in group.results]
        # New case-runs show the cause best, and of these one that was diagnosed, if not all were.
        some = any(run.result.diagnosed for run in runs)
        runs.sort(key=lambda run: (not _is_new(run.age), some and not run.result.diagnosed))
        found.append((group, runs, sum(_is_new(run.age) for run in runs)))
    found.sort(key=lambda entry: not entry[2])
    cards_of = {(group.backend, group.check, group.cause): number for number, (group, _, _) in enumerate(found, 1)}
    in_full = shares([len(runs) for _, runs, _ in found])
    return [
        Card(
            number,
            group,
            new,
            max((run.age for run in runs if run.age), key=lambda age: (age.nights, age.or_earlier), default=None),
            tuple(runs[:full]),
            tuple(runs[full : full + MOST_NAMED]),
            in_common(group.results, report.results),
            tuple(
                (backend, other)
                for (backend, *cause), other in cards_of.items()
                if cause == [group.check, group.cause] and backend != group.backend
            ),
        )
        for number, ((group, runs, new), full) in enumerate(zip(found, in_full, strict=True), 1)
    ]


def _is_new(age: Age | None) -> bool:
    return age is not None and not age.since


def shares(sizes: Sequence[int], most: int = MOST_IN_FULL, of_each: int = MOST_OF_A_CAUSE) -> list[int]:
    """Number of case-runs of each group that are shown in full: one of each group before a second of any group,
    ``most`` in all."""
    given = [0] * len(sizes)
    left = most
    for turn in range(of_each):
        for index, size in enumerate(sizes):
            if size > turn and left:
                given[index] += 1
                left -= 1
    return given


def size_text(count: int) -> str:
    """Bytes for a table: ``512 B``, ``1.5 KiB``, ``20.0 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def age_words(age: Age | None) -> str:
    """An age in words: ``new tonight``, ``red since 2026-11-14, 5 nights``; empty if no earlier night is known."""
    if age is None:
        return ""
    if not age.since:
        return "new tonight"
    return f"red since {age.since[:10]}{' or earlier' if age.or_earlier else ''}, {age.nights} nights"


def verdict_of(report: Report) -> str:
    """The verdict of a run in one line."""
    text = verdict(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    return text if report.finished or report.interrupted else f"INCOMPLETE: the run was cut off; until then: {text}"


def page_model(report: Report, previous: Report | None, history: History) -> dict[str, Any]:
    """Values for the templates. ``previous``: the night to compare with; ``history``: also the nights before it."""
    results = report.results
    runs = [result for result in results if result.case]
    counts = Counter(result.status for result in runs)
    nights = (history.nights or ((night_of(previous),) if previous else ()))[-MOST_NIGHTS:]
    tally = rows(results)
    good = report.exit_code == 0 and report.finished
    emulated = report.header.device == "emulated"
    found = cards(report, nights)
    known = [result for result in runs if result.status in (Status.KNOWN_FAILURE, Status.QUARANTINED)]
    return {
        "report": report,
        "header": report.header,
        "verdict": verdict_of(report),
        "good": good,
        "counts": [(status, counts[status]) for status in Status if counts[status]],
        "total": max(1, sum(counts.values())),
        "bad": sum(result.status in BAD for result in runs),
        "changes": compare_reports(previous, report) if previous else None,
        "previous": previous,
        "overviews": overviews(results, emulated=emulated, backends=list(report.header.backends)),
        "card_of": _card_of(found, emulated),
        "cards": found[:MOST_CARDS],
        "other_cards": found[MOST_CARDS:],
        "all_cards": found,
        "trend": _trend(report, nights) if nights else [],
        "nights": len(nights),
        "first_night": nights[0].started[:10] if nights else "",
        "history": history,
        "known": [(result, issue_splits(result.reason)) for result in known[:MOST_LINES]],
        "known_more": max(0, len(known) - MOST_LINES),
        "margins": _margins(runs),
        "tightest": [] if good else _tightest(runs),
        "slowest": [] if good else sorted((r for r in runs if r.status in RAN), key=seconds_of, reverse=True)[:TOP],
        "covered": covered(runs) if good else [],
        "covered_columns": COLUMNS,
        "matrices": check_matrices(runs),
        "rows": tally,
        "memory_rows": [row for row in tally if row.memory],
        "size_text": size_text,
        "not_declared": not_declared_lines(report.header.not_declared),
        "diagnosed": any(row.diagnosis for row in tally),
        "row_seconds": sum(row.seconds + row.diagnosis for row in tally),
        "used": [status for status in Status if any(row.counts.get(status) for row in tally)],
        "bad_statuses": BAD,
        "emulated": sorted({part for result in runs for part in emulated_parts(result)}),
        "emulation": _emulation(runs),
        "notes": [
            *note_lines(report.header.notes),
            *repeated_lines(runs),
            *(line.replace("`", "") for line in printed_lines(runs)),
        ],
        "launch_lines": launch_lines(report.header, report.results),
        "excluded": excluded_lines(report.header.excluded),
        "not_covered": [*left_lines(report.header, runs), *not_covered_lines(report.header.not_covered)],
        "hints": remarks_of(results).most_common(),
        "seconds_of": seconds_of,
        "emulated_parts": emulated_parts,
        "age_words": age_words,
    }


def _card_of(found: Sequence[Card], emulated: bool) -> dict[tuple[str, str, str, bool], list[int]]:
    """Map (backend, mode, execution, emulated) to the cards of its red case-runs, in the page's order."""
    numbers: dict[tuple[str, str, str, bool], list[int]] = {}
    for card in found:
        places = ((*r.place, is_emulated(r, emulated)) for r in card.group.results)
        for place in dict.fromkeys(places):
            numbers.setdefault(place, []).append(card.number)
    return numbers


def issue_splits(reason: str) -> list[tuple[str, bool]]:
    """Split a reason into pairs of text and whether it is an address."""
    return [(part, part.startswith("http")) for part in re.split(r"(https?://[^\s;,]+)", reason) if part]


def _trend(report: Report, nights: Sequence[Night]) -> list[tuple[str, str, Markup]]:
    """Triples of backend, passed and planned case-runs tonight, and a figure with one column per night."""
    all_nights = [*nights, night_of(report)]
    tonight = all_nights[-1]
    return [
        (
            backend,
            f"{tonight.passed[backend]} of {tonight.declared[backend]}",
            nights_plot([_column(night, backend) for night in all_nights]),
        )
        for backend in tonight.declared
    ]


def _column(night: Night, backend: str) -> tuple[str, int, int, int, bool]:
    passed, red, declared = (each.get(backend, 0) for each in (night.passed, night.red, night.declared))
    return night.started[:10], passed, red, declared, night.finished


_DTYPES = re.compile(r"-(fp16|bf16|fp32)-(?:.*-kv([a-z0-9]+)(?=-))?")
"""The dtype in a case id, and the dtype of the KV pool if it differs."""


def dtype_of(case: str) -> str:
    """The dtypes of a case in words: ``bf16``, ``bf16, KV fp8e4m3``; ``other`` for an id that cannot be read."""
    found = _DTYPES.search(case)
    if not found:
        return "other"
    return found[1] + (f", KV {found[2]}" if found[2] else "")


def _margins(runs: Sequence[CaseResult]) -> list[tuple[str, Markup]]:
    """Pairs of backend and a plot of its margins by dtype and mode."""
    by_backend: dict[str, dict[tuple[str, str], list[float]]] = {}
    for result in runs:
        if result.status is Status.PASSED and result.margin is not None:
            places = by_backend.setdefault(result.backend, {})
            places.setdefault((dtype_of(result.case), result.mode), []).append(result.margin)
    return [
        (backend, margin_plot({f"{mode} {dtype}": places[dtype, mode] for dtype, mode in sorted(places, key=_order)}))
        for backend, places in by_backend.items()
    ]


def _order(place: tuple[str, str]) -> tuple[str, int]:
    dtype, mode = place
    return dtype, MODES.index(mode) if mode in MODES else len(MODES)


def _tightest(runs: Sequence[CaseResult]) -> list[CaseResult]:
    passed = [result for result in runs if result.status is Status.PASSED and result.margin is not None]
    return sorted(passed, key=lambda result: result.margin or 0.0, reverse=True)[:TOP]


def _emulation(runs: Sequence[CaseResult]) -> list[tuple[str, int, dict[str, int]]]:
    """Triples of backend, case-runs that ran, and how many of them had an emulated device, graph or kernels."""
    ran: Counter[str] = Counter()
    parts: dict[str, Counter[str]] = {}
    for result in runs:
        if result.status in RAN:
            ran[result.backend] += 1
            parts.setdefault(result.backend, Counter()).update(emulated_parts(result))
    return [(backend, ran[backend], dict(counts)) for backend, counts in parts.items() if counts]
