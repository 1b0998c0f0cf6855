"""Changes between two runs, which a nightly job reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure
from .history import Key, key_of
from .record import Report, plain
from .verdict import conclude

SHRUNK = 1.5
"""Factor by which an error, relative to its limit, must grow to be reported."""
WORTH_A_LOOK = 0.25
"""Part of the limit that an error must reach to be reported."""
SHOWN = 20
"""Number of changes of a kind that the text lists."""
SHOWN_IN_FULL = 5
"""Number of changes of a kind that the text shows in full."""


@dataclass(frozen=True)
class Change:
    """One case-run, before and after."""

    backend: str
    mode: str
    execution: str
    case: str
    old: str
    """The old status or margin."""
    new: str
    """The new status or margin."""
    text: str = ""
    """The failure's text, if the case-run fails now."""

    def __str__(self) -> str:
        return f"{self.backend} {self.execution} {self.case}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Comparison:
    """Every case-run whose result changed."""

    newly_failing: tuple[Change, ...]
    newly_passing: tuple[Change, ...]
    vanished: tuple[Change, ...]
    """Case-runs that ran before and do not run now, so that coverage shrinks."""
    not_reached: tuple[Change, ...]
    """Case-runs that ran before, but for which the new run's budget left no time."""
    appeared: tuple[Change, ...]
    shrunk_margins: tuple[Change, ...]
    still_failing: tuple[Change, ...]
    remarks: tuple[str, ...]
    """Differences between the runs as a whole that make their case-runs hard to compare."""
    newly_excused: tuple[Change, ...] = ()
    """Case-runs that passed before, and that an entry of the known-failures file excuses now."""
    problems: tuple[str, ...] = ()
    """Reasons besides its case-runs why the new run is worse: it did not finish, or has a problem that the old one does
    not have.
    """

    @property
    def exit_code(self) -> int:
        """The exit code: 1 if the new run is worse."""
        return 1 if self.newly_failing or self.vanished or self.problems else 0

    def as_plain(self) -> dict[str, Any]:
        """The comparison as plain values for JSON."""
        result: dict[str, Any] = plain({**asdict(self), "exit_code": self.exit_code})
        return result


def compare_reports(old: Report, new: Report) -> Comparison:
    """Compare case-run by case-run; the order of the files' rows does not matter."""
    before, after = _by_key(old), _by_key(new)
    both = [key for key in after if key in before]
    pairs = [(before[key], after[key]) for key in both]

    def failing(was: CaseResult | None, now: CaseResult) -> Change:
        return replace(_change(was, now), text=format_failure(now, new.header, first_only=True))

    return Comparison(
        newly_failing=tuple(failing(b, a) for b, a in pairs if _bad(a) and not _bad(b))
        + tuple(failing(None, after[key]) for key in after if key not in before and _bad(after[key])),
        newly_passing=tuple(_change(b, a) for b, a in pairs if _bad(b) and a.status is Status.PASSED),
        vanished=tuple(_change(b, a) for b, a in pairs if _ran(b) and not _ran(a) and not a.left_out)
        + tuple(_change(before[key], None) for key in before if key not in after and _ran(before[key])),
        not_reached=tuple(_change(b, a, now="not reached") for b, a in pairs if _ran(b) and a.left_out),
        appeared=tuple(_change(None, after[key]) for key in after if key not in before and not _bad(after[key])),
        shrunk_margins=tuple(
            _change(b, a, f"{_margin(b):.3f}", f"{_margin(a):.3f}") for b, a in pairs if _margin_shrank(b, a)
        ),
        still_failing=tuple(_change(b, a) for b, a in pairs if _bad(b) and _bad(a)),
        remarks=tuple(_remarks(old, new)),
        newly_excused=tuple(
            _change(b, a) for b, a in pairs if b.status is Status.PASSED and a.status is Status.KNOWN_FAILURE
        ),
        problems=(
            *([] if new.finished else ["the new run did not finish"]),
            *(problem for problem in new.problems if problem not in old.problems),
        ),
    )


def ending_of(report: Report) -> int:
    """The exit code of a run by itself: the exit code of its verdict, or 1 if it was cut off."""
    found = conclude(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    return found.code or (0 if report.finished else 1)


def comparison_text(found: Comparison) -> str:
    """The comparison as text for a terminal or a log: the worst first, the verdict last."""
    sections: list[tuple[str, Sequence[Change]]] = [
        ("newly failing", found.newly_failing),
        ("vanished", found.vanished),
        ("margins that shrank (error / limit)", found.shrunk_margins),
        ("still failing", found.still_failing),
        ("newly passing", found.newly_passing),
    ]
    # Not counted in the last line, which older readers of logs know; shown where there are any.
    sections += [("newly excused as known failures", found.newly_excused)] if found.newly_excused else []
    lines = [f"note: {remark}" for remark in found.remarks]
    lines += [f"problem: {problem}" for problem in found.problems]
    if found.not_reached:
        lines.append(f"note: the new run's budget left no time for {len(found.not_reached)} of the old run's case-runs")
    for title, changes in sections:
        if not changes:
            continue
        lines.append(f"{title}: {len(changes)}")
        for index, change in enumerate(changes[:SHOWN]):
            lines.append(f"  {change}")
            if index < SHOWN_IN_FULL:
                lines += [f"    {line}" for line in change.text.splitlines()]
        if len(changes) > SHOWN:
            lines.append(f"  and {len(changes) - SHOWN} more")
    counts = ", ".join(f"{len(changes)} {title.partition(' (')[0]}" for title, changes in sections)
    lines.append(f"{'WORSE' if found.exit_code else 'not worse'}: {counts}, {len(found.appeared)} new case-runs")
    return "\n".join(lines)


def _by_key(report: Report) -> dict[Key, CaseResult]:
    return {key_of(r, report.header.seed): r for r in report.results if r.case}


def _bad(result: CaseResult) -> bool:
    return result.status in BAD


def _ran(result: CaseResult) -> bool:
    return _bad(result) or result.status in (Status.PASSED, Status.KNOWN_FAILURE)


def _margin(result: CaseResult) -> float:
    return result.margin if result.margin is not None else 0.0


def _margin_shrank(old: CaseResult, new: CaseResult) -> bool:
    # An emulated kernel and the real one always differ, so only results of the same kind are compared.
    alike = (old.device, old.graph, old.kernels) == (new.device, new.graph, new.kernels)
    passed = old.status is new.status is Status.PASSED
    a, b = _margin(old), _margin(new)
    return alike and passed and math.isfinite(b) and b >= WORTH_A_LOOK and b > a * SHRUNK


def _change(old: CaseResult | None, new: CaseResult | None, was: str = "", now: str = "") -> Change:
    known = new or old
    assert known is not None
    was = was or (old.status.value if old else "absent")
    now = now or (new.status.value if new else "absent")
    return Change(known.backend, known.mode, known.execution, known.case, was, now)


def _remarks(old: Report, new: Report) -> list[str]:
    a, b = old.header, new.header
    remarks = [
        f"{name} differs: {was} -> {now}"
        for name, was, now in (
            ("device", a.device_name, b.device_name),
            ("tier", a.tier, b.tier),
            ("kit", a.kit, b.kit),
        )
        if was != now
    ]
    if a.seed != b.seed:
        remarks.append(f"seeds differ: {a.seed} -> {b.seed}; case-runs are compared by their ids without the seed")
    remarks += [
        f"{name} {a.versions.get(name, 'absent')} -> {b.versions.get(name, 'absent')}"
        for name in sorted({*a.versions, *b.versions})
        if a.versions.get(name) != b.versions.get(name)
    ]
    remarks += [
        f"backend {spec} {a.backends[spec] or 'unversioned'} -> {version or 'unversioned'}"
        for spec, version in b.backends.items()
        if spec in a.backends and a.backends[spec] != version
    ]
    remarks += [f"the {age} run did not finish" for age, run in (("old", old), ("new", new)) if not run.finished]
    return remarks
