"""What the two kits found and how long they took, as plain values, and their tables in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bug:
    """One of ``packages/servers/tests/bridges/sglang_bugs.py``, and where it shows."""

    name: str
    thread: str
    """Of SGLang's repository."""
    mode: str
    execution: str


BUGS = (
    Bug("DoubleCount", "#26512", "draft-extend-v2", "graph"),
    Bug("PackedOffsets", "#21987", "draft-extend-v2", "graph"),
    Bug("NoWindowInDraftExtend", "#29858", "draft-extend-v2", "graph"),
    Bug("FreshTensor", "#26019", "decode", "graph"),
    Bug("StaleMask", "#32920", "target-verify", "graph"),
)
"""Put into a class that is right without them."""
SHIPPED = (
    Bug("WindowsInDecode", "#32087", "decode", "eager"),
    Bug("FP8", "#22277", "target-verify", "eager"),
)
"""They are in the release itself: here they are declared, and its own kit runs as it is."""


@dataclass(frozen=True)
class Rate:
    """Cases of a class that is right, and what they took after one that is not counted."""

    who: str
    cases: int
    red: tuple[str, ...]
    """Those that did not pass, each with the first line of why."""
    seconds: float
    cpu_seconds: float
    """Of all processes together."""
    checked: int
    """Forwards whose outputs were held against a reference."""


@dataclass(frozen=True)
class Count:
    """``red`` of ``cases`` did not pass."""

    red: int
    cases: int

    def __str__(self) -> str:
        if not self.cases:
            return "none has it"
        return f"{self.red} of {self.cases}" if self.red else f"missed: 0 of {self.cases}"


@dataclass(frozen=True)
class Comparison:
    """Everything from one run of ``ci/side_by_side.py``."""

    backend: str
    machine: str
    versions: Mapping[str, str]
    rates: tuple[Rate, ...] = ()
    found: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    """Bug -> who looked for it -> what was found."""


def as_json(made: Comparison) -> dict[str, Any]:
    """For ``json.dumps``."""
    return asdict(made)


def as_text(made: Comparison) -> str:
    """Two tables: how many cases a second, and which bugs were found."""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    lines = [f"{made.backend} on {made.machine}; {versions}", ""]
    lines += _table(
        ("", "cases", "not passed", "s", "cases/s", "CPU s", "cases/CPU s", "checked forwards", "/s", "/CPU s"),
        [_rate(rate) for rate in made.rates],
    )
    lines += [f"not passed without a bug, {rate.who}: {red}" for rate in made.rates for red in rate.red]
    if made.found:
        who = tuple(dict.fromkeys(name for found in made.found.values() for name in found))
        of = {bug.name: bug for bug in (*BUGS, *SHIPPED)}
        rows = [
            (name, of[name].thread, *(str(found.get(each, "")) for each in who)) for name, found in made.found.items()
        ]
        lines += ["", *_table(("bug", "sglang", *who), rows)]
    return "\n".join(lines)


def _rate(rate: Rate) -> tuple[str, ...]:
    def each(count: int, seconds: float) -> str:
        return f"{count / seconds:.1f}" if seconds else ""

    return (
        rate.who, str(rate.cases), str(len(rate.red)),
        f"{rate.seconds:.1f}", each(rate.cases, rate.seconds),
        f"{rate.cpu_seconds:.1f}", each(rate.cases, rate.cpu_seconds),
        str(rate.checked), each(rate.checked, rate.seconds), each(rate.checked, rate.cpu_seconds),
    )  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows))
    return ["  ".join(row).rstrip() for row in padded]
