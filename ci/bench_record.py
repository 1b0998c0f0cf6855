"""What the bench has measured, kept in a file, and held against what it measured before on the same machine."""

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

_FORMAT = 1


class OtherMachine(Exception):
    """Figures of two machines are no comparison. The message says in what they differ."""


@dataclass(frozen=True)
class Row:
    """One case, run again and again."""

    backend: str
    mode: str
    execution: str
    case_run_ms: float
    """Of one case-run, everything included."""
    cpu_ms: float
    """The same of all processes together, which a busy machine changes less."""
    replays_per_s: float
    """Replays that were checked; 0 in eager."""
    eager_steps_per_s: float
    """Eager steps that were checked; a graph case-run has some too."""
    phases_ms: Mapping[str, float]
    """Of one case-run, by what it was spent on."""

    @property
    def name(self) -> str:
        """``torch_native decode graph``."""
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
    """What figures belong to. ``device``: as the plan names it."""
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
    """Keep it as JSON. Raises ``OSError``."""
    path.write_text(json.dumps({"format": _FORMAT, **asdict(record)}, indent=1) + "\n", "utf-8")


def read(path: Path) -> Record:
    """What ``write`` kept. Raises ``OSError``, and ``ValueError`` for a file that is none of its."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if found.pop("format") != _FORMAT:
            raise ValueError(f"{path} was written by another version of the bench")
        return Record(**{**found, "rows": tuple(Row(**row) for row in found["rows"])})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of the bench: {type(error).__name__}: {error}") from error


def compared(now: Record, before: Record) -> list[tuple[str, float, float]]:
    """(what, before, now) of every figure that both hold; less is better in all of them.

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
    """Raises ``OtherMachine`` where figures from ``there`` are no comparison for figures from ``here``."""
    other = [
        f"{name} {there.get(name, 'unknown')!r} there, {here.get(name, 'unknown')!r} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    if other:
        raise OtherMachine(f"figures of another machine are no comparison: {'; '.join(other)}")


def tenths(spent: Mapping[str, float], total: float) -> list[tuple[str, float]]:
    """(step, its part of ``total``) of every step that takes a tenth of it or more, the largest first."""
    parts = [(name, seconds / total) for name, seconds in spent.items() if total > 0]
    return sorted((part for part in parts if part[1] >= 0.1), key=lambda part: -part[1])


def changed_versions(now: Record, before: Record) -> Sequence[str]:
    """``torch 2.13.0 -> 2.14.0`` of everything that has another version now."""
    names = sorted({*now.versions, *before.versions})
    pairs = ((name, before.versions.get(name, "none"), now.versions.get(name, "none")) for name in names)
    return [f"{name} {was} -> {is_}" for name, was, is_ in pairs if was != is_]
