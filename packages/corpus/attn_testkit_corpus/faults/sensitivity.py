"""The smallest error that the kit finds in one key, one row, one head, compared with a fixed tolerance.

``python -m attn_testkit_corpus.faults.sensitivity docs/explanation`` writes ``sensitivity.md`` and ``sensitivity.svg``
there. The checked output is the oracle's own with the error, rounded to the dtype, so the result does not depend on a
kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch

from attn_testkit.cases.case import CODES, DATA, parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.families.expected import Expected, expect
from attn_testkit.steps.data import DTYPES, StepData, make_layers
from attn_testkit.steps.schedule import Schedule, make_schedule

LENGTHS = (64, 512, 4096)
KINDS = ("key", "any", "row", "head")
_WORDS = {
    "key": "the weight of the last key",
    "any": "the weight of a key in the middle",
    "row": "one query row, all heads",
    "head": "one query head, all rows",
}
TOLERANCE = 3e-2
"""The absolute and relative tolerance that servers' attention tests use with bfloat16."""
_DTYPES = ("fp32", "fp16", "bf16")
_ROWS = 4
_FINEST, _STEP = 2.0**-30, 2.0**0.25
_LONG = 1000
"""Cases of more keys than this run only with one-hot values and with codes: see ``catalogue/tiers.py``."""
_ANY_LENGTHS = (*LENGTHS, 66_000)
"""Lengths for a key in the middle, which one-hot values observe only in short requests."""


@dataclass(frozen=True)
class Point:
    """One measurement."""

    kind: str
    dtype: str
    length: int
    kit: float | None
    """Smallest relative error that is caught, searched in steps of 2^(1/4); None: not even 1 (a key left out)."""
    pattern: str
    """The data pattern that catches it first."""
    fixed: float | None
    """Smallest error that a fixed tolerance finds with normal data."""
    before: float | None = None
    """Smallest error without codes, for a key in the middle."""


def _schedule(dtype: str, length: int, data: str) -> Schedule:
    return make_schedule(
        parse_case(f"draft-extend-v2-gqa2x2-d128-{dtype}-p16-k{length - _ROWS}-n{_ROWS}a{_ROWS}-shuffled-{data}-b1prod")
    )


def _error(kind: str, schedule: Schedule, expected: Expected) -> torch.Tensor:
    """[T, Hq, Dv] float64: change of layer 0's output by an error of relative size 1."""
    out = expected.attention[0]
    error = torch.zeros_like(out)
    if kind == "row":
        error[_ROWS - 1] = out[_ROWS - 1]
    elif kind == "head":
        error[:, 1] = out[:, 1]
    else:
        layer, data = make_layers(schedule.case)[0], expected.data
        key = data.stored_keys.shape[2] - 1 if kind == "key" else _in_the_middle(data)
        keys = data.keys[0, 0].repeat_interleave(layer.q_per_kv, 1)
        logits = torch.einsum("hd,shd->hs", data.q[0, _ROWS - 1].double(), keys) * layer.scaling
        values = data.values[0, 0, key].repeat_interleave(layer.q_per_kv, 0)
        error[_ROWS - 1] = torch.softmax(logits, -1)[:, key, None] * values
    return error


def _in_the_middle(data: StepData) -> int:
    """Find a key in the second half that no one-hot value marks. None: all are marked."""
    marked = data.values[0, 0].flatten(1).count_nonzero(-1)
    middle = len(marked) // 2
    return middle + int((marked[middle:] == 0).int().argmax())


def _smallest(caught: Callable[[float], bool]) -> float | None:
    """The smallest error that is caught, on a logarithmic grid; every larger one up to 1 is caught as well."""
    if not caught(1.0):
        return None
    low, high = 0, round(math.log(1 / _FINEST, _STEP))
    while low < high:  # sizes are 1 / _STEP^n: find the largest n that is caught
        middle = (low + high + 1) // 2
        low, high = (middle, high) if caught(_STEP**-middle) else (low, middle - 1)
    return float(_STEP**-low)


def _kit(kind: str, schedule: Schedule, size: float) -> bool:
    step = schedule.steps[0]
    expected = expect(schedule, step)
    wrong = expected.attention.clone()
    wrong[0] -= size * _error(kind, schedule, expected)
    outs = wrong.to(DTYPES[schedule.case.dtype]).unbind(0)
    copies = copies_of([("attention", str(layer), out) for layer, out in enumerate(outs)])
    observed = Observation(schedule, step, "", copies)
    return not Comparison(observed, expected).right


def _fixed(kind: str, schedule: Schedule, size: float) -> bool:
    expected = expect(schedule, schedule.steps[0])
    dtype, out = DTYPES[schedule.case.dtype], expected.attention[0]
    wrong = (out - size * _error(kind, schedule, expected)).to(dtype).double()
    return not torch.allclose(wrong, out.to(dtype).double(), rtol=TOLERANCE, atol=TOLERANCE)


def point(kind: str, dtype: str, length: int) -> Point:
    """Measure one point."""
    patterns = (*(DATA if length < _LONG else ("one_hot",)), CODES)
    found: list[tuple[float, str]] = []
    for pattern in patterns:
        schedule = _schedule(dtype, length, pattern)
        size = _smallest(lambda e, s=schedule: _kit(kind, s, e))  # type: ignore[misc]
        found += [(size, pattern)] if size is not None else []
    plain = _schedule(dtype, length, "gauss")
    best = min(found, default=(None, ""))
    before = min((size for size, pattern in found if pattern != CODES), default=None) if kind == "any" else None
    return Point(kind, dtype, length, best[0], best[1], _smallest(lambda e: _fixed(kind, plain, e)), before)


def measure() -> Iterator[Point]:
    """Measure all points."""
    for kind in KINDS:
        for dtype in _DTYPES:
            for length in _lengths(kind):
                yield point(kind, dtype, length)


def _lengths(kind: str) -> tuple[int, ...]:
    return _ANY_LENGTHS if kind == "any" else LENGTHS


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attn_testkit_corpus.faults", "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = lambda value: "not caught" if value is None else f"{value:.2g}"
    return environment.get_template(name)


def markdown(points: list[Point]) -> str:
    """The page as Markdown."""
    return _template("sensitivity.md.j2").render(points=points, words=_WORDS, tolerance=TOLERANCE)


def svg(points: list[Point]) -> str:
    """One panel for each kind; keys to the right, the smallest error that is caught upwards, both logarithmic.

    Series whose last points lie on each other share a label; lines of a fixed tolerance are set apart by a little, so
    that none covers another.
    """
    panels = []
    for index, kind in enumerate(KINDS):
        left, lengths = _LEFT + index * _PANEL, _lengths(kind)
        lines: list[dict[str, Any]] = []
        for dtype in _DTYPES:
            mine = [p for p in points if (p.kind, p.dtype) == (kind, dtype)]
            series = [("kit", [p.kit for p in mine]), ("fixed", [p.fixed for p in mine])]
            series += [("before", [p.before for p in mine])] if kind == "any" else []
            for who, sizes in series:
                apart = 5.0 * (_DTYPES.index(dtype) - 1) if who != "kit" else 0.0
                at = [(left + _x(p.length, lengths), _y(size) + apart) for p, size in zip(mine, sizes, strict=True)]
                lines.append({"dtype": dtype, "who": who, "at": at, "missed": [size is None for size in sizes]})
        xticks = [(_x(length, lengths), f"{length:,}") for length in lengths]
        panels.append({"left": left, "title": _WORDS[kind], "lines": lines, "labels": _labels(lines), "xticks": xticks})
    ticks = [(_y(10.0**-n), f"{100 * 10.0**-n:g}%") for n in range(6)]
    return _template("sensitivity.svg.j2").render(
        panels=panels, ticks=ticks, missed_y=_y(None), left=_LEFT, right=_x(LENGTHS[-1], LENGTHS)
    )


_LEFT, _PANEL = 104, 300
_LABEL = 14.0
"""Height of a label's line."""


def _labels(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Labels: the kit's lines by dtype at their right ends, pushed apart; the fixed ones by one common label."""
    ends = [(line["at"][-1], line) for line in lines]
    kit = sorted(((y, x, line["dtype"]) for (x, y), line in ends if line["who"] == "kit"), key=lambda end: end[0])
    labels: list[dict[str, Any]] = []
    lowest = 0.0
    for y, x, dtype in kit:
        lowest = max(y, lowest + _LABEL)
        labels.append({"x": x + 9, "y": round(lowest + 4, 1), "text": dtype, "css": dtype})
    return labels


def _x(length: int, lengths: tuple[int, ...]) -> float:
    return round(14 + 200 * math.log(length / lengths[0]) / math.log(lengths[-1] / lengths[0]), 1)


def _y(size: float | None) -> float:
    """Height in the plot: five decades and a bit; uncaught errors are above 1."""
    return 72.0 if size is None else round(106 - 200 * max(-5.0, math.log10(size)) / 5, 1)


def main(argv: list[str]) -> int:
    """Write both files into the folder that is given, or print the table."""
    points = list(measure())
    if not argv:
        print(markdown(points))
        return 0
    folder = Path(argv[0])
    (folder / "sensitivity.md").write_text(markdown(points))
    (folder / "sensitivity.svg").write_text(svg(points))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
