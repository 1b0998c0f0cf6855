"""Earlier nights: how many of a backend's case-runs passed in each, and how long each failure has been red.

A folder holds one results file per night, under any name. Nights are ordered by when they started.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry import UsageError
from ..results.case_result import BAD, CaseResult, Status
from .record import FORMAT, Report, read_report

Key = tuple[str, str, str, str]
"""Backend, mode, execution, and the case without the seed of its run, which changes only data, slots and the last word
of the id."""


@dataclass(frozen=True)
class Night:
    """The part of a results file that is kept."""

    started: str
    finished: bool
    passed: Mapping[str, int]
    """Backend -> case-runs that passed."""
    red: Mapping[str, int]
    """Backend -> case-runs that failed, crashed, timed out or passed unexpectedly."""
    declared: Mapping[str, int]
    """Backend -> case-runs in the results file; fewer than planned if the night did not finish."""
    statuses: Mapping[Key, Status]
    """Statuses of the case-runs in question."""


@dataclass(frozen=True)
class History:
    """Earlier nights that can be compared with a report: the same tier, and both real or both emulated."""

    nights: tuple[Night, ...] = ()
    """The nights, oldest first."""
    last: Path | None = None
    """The results file of the newest night that finished."""
    last_good: Path | None = None
    """The results file of the newest night that finished with exit code 0."""
    remarks: tuple[str, ...] = ()
    """Names of files that were left out, with the reason."""


@dataclass(frozen=True)
class Age:
    """The time for which a case-run has been red without a break."""

    since: str
    """Start of the first of these nights, ISO; empty if it is red tonight for the first time."""
    nights: int
    """Number of nights in which it was red, this one included."""
    or_earlier: bool
    """True if no earlier night shows another status."""


def key_of(result: CaseResult, seed: int) -> Key:
    """The name of a case-run that stays the same from night to night. ``seed``: the seed of its run."""
    return _key(result.backend, result.mode, result.execution, result.case, seed)


def _key(backend: str, mode: str, execution: str, case: str, seed: int) -> Key:
    return backend, mode, execution, case.removesuffix(f"-s{seed}")


def age_of(nights: Sequence[Night], key: Key) -> Age | None:
    """The age of a case-run that is red now; None if there are no nights. ``nights``: oldest first.

    A night in which it did not run, because the night was cut off or the machine could not run it, is skipped.
    """
    if not nights:
        return None
    since, count = "", 1
    for night in reversed(nights):
        status = night.statuses.get(key)
        if status in BAD:
            since, count = night.started, count + 1
        elif status in _OTHERWISE:
            return Age(since, count, or_earlier=False)
    return Age(since, count, or_earlier=bool(since))


_OTHERWISE = (Status.PASSED, Status.KNOWN_FAILURE, Status.QUARANTINED)
"""Statuses of a case-run that was not red."""


def night_of(report: Report) -> Night:
    """Make a night of a whole report."""
    statuses = {key_of(result, report.header.seed): result.status for result in report.results if result.case}
    return _night(report.header.started, report.finished, statuses.items(), statuses)


def _night(started: str, finished: bool, runs: Iterable[tuple[Key, Status]], asked: Collection[Key]) -> Night:
    passed: Counter[str] = Counter()
    red: Counter[str] = Counter()
    declared: Counter[str] = Counter()
    statuses: dict[Key, Status] = {}
    for key, status in runs:
        backend = key[0]
        declared[backend] += 1
        passed[backend] += status is Status.PASSED
        red[backend] += status in BAD
        if key in asked:
            statuses[key] = status
    return Night(started, finished, passed, red, declared, statuses)


def read_history(folder: str | Path, report: Report) -> History:
    """Read the nights before ``report`` from the ``*.json`` of a folder, with statuses of what is red in ``report``.

    A file that cannot be used becomes a remark. Raises ``UsageError`` if there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; expected a folder of results files")
    red = {key_of(r, report.header.seed) for r in report.results if r.case and r.status in BAD}
    found: list[tuple[Night, Path]] = []
    remarks, good = [], set()
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_bytes())
            why = _not_comparable(data, report)
            if why:
                remarks.append(f"{path.name} {why}")
            elif data["header"]["started"] < report.header.started:
                found.append((_night_of_plain(data, red), path))
                good |= {path} if data["exit_code"] == 0 else set()
        except (OSError, ValueError, KeyError, TypeError) as error:
            remarks.append(f"{path.name} cannot be read: {type(error).__name__}")
    found.sort(key=lambda each: each[0].started)
    finished = [path for night, path in found if night.finished]
    green = [path for path in finished if path in good]
    return History(
        tuple(night for night, _ in found),
        finished[-1] if finished else None,
        green[-1] if green else None,
        tuple(remarks),
    )


def _not_comparable(data: Any, report: Report) -> str:
    """The reason why a results file cannot be compared with ``report``; empty if it can."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return "is not a results file that this kit reads"
    header = data["header"]
    for name in ("tier", "device"):
        if header[name] != getattr(report.header, name):
            return f"is of another {name}: {header[name]}"
    # A night of a part lacks what it left out, so that nothing of that could newly fail or vanish.
    part = tuple(header.get("selection", {}).get("by", ()))
    if part and part != report.header.selection.by:
        return f"is of only a part: {', '.join(part)}"
    return ""


def _night_of_plain(data: Mapping[str, Any], asked: Collection[Key]) -> Night:
    # Only a few figures of months of nights are needed, so their results are not made into objects.
    header = data["header"]
    runs = (
        (_key(r["backend"], r["mode"], r["execution"], r["case"], header["seed"]), Status(r["status"]))
        for r in data["results"]
        if r["case"]
    )
    return _night(header["started"], data["finished"], runs, asked)


def last_night(folder: str | Path, report: Report, *, good: bool = False) -> Report | None:
    """Return the newest finished night before ``report`` in a folder of results files. ``good``: of exit code 0."""
    history = read_history(folder, report)
    last = history.last_good if good else history.last
    return read_report(last) if last else None
