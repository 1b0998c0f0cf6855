"""Figures of the bench, kept in a file and compared with earlier ones of the same machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "OtherMachine", "Record", "Row", "changed_versions", "check_same", "compared", "machine", "read", "tenths", "write"
]  # fmt: skip

_FORMAT = 2


class OtherMachine(Exception):
    """Raised for figures of two machines, which cannot be compared. The message names the differences."""


@dataclass(frozen=True)
class Row:
    """One case, run again and again."""

    backend: str
    mode: str
    execution: str
    case_run_ms: float
    """Wall time of one case-run, everything included."""
    cpu_ms: float
    """CPU time of all processes per case-run, which a busy machine changes less."""
    replays_per_s: float
    """Checked replays per second; 0 in eager."""
    eager_steps_per_s: float
    """Checked eager steps per second; a graph case-run has some too."""
    layer_steps_per_s: float
    """Checked layers of replays and eager steps per second."""
    phases_ms: Mapping[str, float]
    """Wall time of one case-run by phase."""

    @property
    def name(self) -> str:
        """Name of the row, as ``torch_native decode graph``."""
        return f"{self.backend} {self.mode} {self.execution}"


@dataclass(frozen=True)
class Record:
    """Everything from one run of the bench."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    start_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds from the start of a run to its plan, and to its first result."""
    memory_mb: Mapping[str, float] = field(default_factory=dict)
    """Most proportional set size, in 10^6 bytes, of the judge, and of workers with what they are forked from."""


def machine(device: str, *, in_process: bool) -> dict[str, str]:
    """Description of the machine that figures belong to. ``device``: its name in the plan."""
    return {
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "device": device,
        "system": f"{platform.system()} {platform.machine()}",
        "processes": "one" if in_process else "a judge and a worker",
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write(record: Record, path: Path) -> None:
    """Write a record as JSON. Raises ``OSError``."""
    path.write_text(json.dumps({"format": _FORMAT, **asdict(record)}, indent=1) + "\n", "utf-8")


def read(path: Path) -> Record:
    """Read a file of ``write``. Raises ``OSError``, and ``ValueError`` for any other file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if found.pop("format") != _FORMAT:
            raise ValueError(f"{path} was written by another version of the bench")
        return Record(**{**found, "rows": tuple(Row(**row) for row in found["rows"])})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a record of the bench: {type(error).__name__}: {error}") from error


def compared(now: Record, before: Record) -> list[tuple[str, float, float]]:
    """Triples of name, before and now of every figure in both records; less is better in all of them.

    Raises ``OtherMachine``.
    """
    check_same(now.machine, before.machine)
    rows = {row.name: row for row in before.rows}
    figures = [
        (f"{row.name}, {words} a case-run", getattr(rows[row.name], field_), getattr(row, field_))
        for row in now.rows
        if row.name in rows
        for words, field_ in (("ms", "case_run_ms"), ("CPU ms", "cpu_ms"))
    ]
    for unit, was, is_ in (("s", before.start_s, now.start_s), ("MB", before.memory_mb, now.memory_mb)):
        figures += [(f"{name}, {unit}", was[name], is_[name]) for name in is_ if name in was]
    return figures


def check_same(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise ``OtherMachine`` if figures from ``there`` cannot be compared with figures from ``here``."""
    other = [
        f"{name} {there.get(name, 'unknown')!r} there, {here.get(name, 'unknown')!r} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    if other:
        raise OtherMachine(f"figures of another machine cannot be compared: {'; '.join(other)}")


def tenths(spent: Mapping[str, float], total: float) -> list[tuple[str, float]]:
    """Pairs of step and its part of ``total``, for every step that takes a tenth or more, the largest first."""
    parts = [(name, seconds / total) for name, seconds in spent.items() if total > 0]
    return sorted((part for part in parts if part[1] >= 0.1), key=lambda part: -part[1])


def changed_versions(now: Record, before: Record) -> Sequence[str]:
    """Changes of versions, as ``torch 2.13.0 -> 2.14.0``."""
    names = sorted({*now.versions, *before.versions})
    pairs = ((name, before.versions.get(name, "none"), now.versions.get(name, "none")) for name in names)
    return [f"{name} {was} -> {is_}" for name, was, is_ in pairs if was != is_]
