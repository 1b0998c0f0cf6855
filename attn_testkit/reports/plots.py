"""Figures of a page as inline SVG: sizes in pixels, colors by class."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup, escape

from ..results.finding import ErrorMap, KeyMap

LEVELS = (1.0, 2.0, 10.0, 100.0, 10_000.0)
"""Error / limit up to which a cell has color 0, 1, ...; a larger one has one color more."""


def level_of(ratio: float) -> int:
    """The color of a ratio to the limit; 0 is right."""
    return sum(ratio > level for level in LEVELS)


def error_plot(errors: ErrorMap) -> Markup:
    """Plot error / limit: rows down, heads across; the first row of each request has the request's number."""
    size, left = 12, 26
    levels = [[level_of(ratio) for ratio in row] for row in errors.ratios]
    columns = len(levels[0])
    width, height = left + size * columns, size * len(levels)
    parts = []
    for level in range(len(LEVELS) + 1):
        path = "".join(
            f"M{left + size * start} {size * y}h{size * length}v{size}h-{size * length}z"
            for y, row in enumerate(levels)
            for start, length in _runs_of(row, level)
        )
        if path:
            parts.append(f'<path class="e{level}" d="{path}"/>')
    lines = "".join(f"M{left + size * x} 0V{height}" for x in range(columns + 1))
    lines += "".join(f"M{left} {size * y}H{width}" for y in range(len(levels) + 1))
    parts.append(f'<path class="grid" d="{lines}"/>')
    for y, request in enumerate(errors.requests):
        if y == 0 or errors.requests[y - 1] != request:
            parts.append(f'<text x="0" y="{size * y + size - 2}">r{request}</text>')
            parts.append(f'<path class="rule" d="M0 {size * y}h{width}"/>' if y else "")
    largest = max(map(max, errors.ratios))
    label = f"error by row and head: {errors.rows} rows, {errors.heads} heads, largest {largest:.3g} times the limit"
    return _svg("errors", width, height, label, parts)


def _runs_of(row: Sequence[int], level: int) -> Iterable[tuple[int, int]]:
    """Pairs of start and length of each run of ``level``."""
    at = 0
    for value, run in itertools.groupby(row):
        length = sum(1 for _ in run)
        if value == level:
            yield at, length
        at += length


def keys_plot(keys: KeyMap) -> Markup:
    """Plot the KV tokens of a request from left to right: expected above, attended below."""
    width, lane = 600, 12
    # A single key of many must remain visible.
    thinnest = 2.0

    def bars(runs: Sequence[tuple[int, int]], kind: str, y: int) -> str:
        path = ""
        for first, last in runs:
            x = width * first / keys.length
            long = max(thinnest, width * (last + 1 - first) / keys.length)
            path += f"M{min(x, width - long):.1f} {y}h{long:.1f}v{lane}h-{long:.1f}z"
        return f'<path class="{kind}" d="{path}"/>' if path else ""

    below = lane + 3
    parts = [
        f'<path class="lane" d="M0 0h{width}v{lane}h-{width}zM0 {below}h{width}v{lane}h-{width}z"/>',
        bars(keys.wanted, "wanted", 0),
        bars(keys.used, "used", below),
        bars(keys.doubled, "doubled", below),
        bars(keys.not_asked, "unknown", below),
    ]
    label = f"KV tokens 0 to {keys.length - 1} of request {keys.request}: expected above, attended below"
    return _svg("keys", width, below + lane, label, parts, stretch=True)


def margin_plot(rows: Mapping[str, Sequence[float]]) -> Markup:
    """Plot margins of case-runs that passed, one line per name: range, middle half, median, and the largest."""
    left, right, step = 195, 410, 20
    height = step * len(rows) + 18

    def x(margin: float) -> str:
        return f"{left + (right - left) * margin:.1f}"

    parts = [f'<path class="rule" d="M{x(at)} 0V{height - 16}"/>' for at in (0, 0.25, 0.5, 0.75)]
    parts.append(f'<path class="limit" d="M{x(1)} 0V{height - 16}"/>')
    parts += [f'<text class="axis" x="{x(at)}" y="{height - 3}">{at:g}</text>' for at in (0, 0.5)]
    parts.append(f'<text class="axis" x="{x(1)}" y="{height - 3}">limit</text>')
    for index, (name, margins) in enumerate(rows.items()):
        y = step * index + step // 2
        low, high = min(margins), max(margins)
        first, middle, third = _quartiles(margins)
        parts.append(
            f"<g><title>{escape(name)}: {len(margins)} passed, median {middle:.2f}, largest {high:.3f}</title>"
            f'<text x="0" y="{y + 4}">{escape(name)}</text>'
            f'<path class="whole" d="M{x(low)} {y}H{x(high)}"/>'
            f'<path class="half" d="M{x(first)} {y}H{x(third)}"/>'
            f'<path class="median" d="M{x(middle)} {y - 5}v10"/>'
            f'<circle cx="{x(high)}" cy="{y}" r="3"/>'
            f'<text x="{right + 6}" y="{y + 4}">{high:.2f}</text></g>'
        )
    return _svg("margins", right + 36, height, "margins by dtype and mode", parts)


def _quartiles(margins: Sequence[float]) -> tuple[float, float, float]:
    if len(margins) == 1:
        return margins[0], margins[0], margins[0]
    first, middle, third = statistics.quantiles(margins, n=4, method="inclusive")
    return first, middle, third


def nights_plot(nights: Sequence[tuple[str, int, int, int, bool]]) -> Markup:
    """Plot one column per night, oldest first: (name, passed, red, planned, finished). Red is always wide enough to
    see."""
    column, gap, height, thinnest = 8, 2, 30, 4.0
    parts = []
    for index, (name, passed, red, declared, finished) in enumerate(nights):
        at = index * (column + gap)
        other = declared - passed - red
        if not declared:
            parts.append(f'<path class="absent" d="M{at} {height - 2}h{column}v2h-{column}z"/>')
            continue
        tall = [max(thinnest, height * count / declared) if count else 0.0 for count in (red, other)]
        tall = [each * min(1.0, height / sum(tall)) if sum(tall) else 0.0 for each in tall]
        tops = [0.0, tall[0], sum(tall), float(height)]
        column_parts = "".join(
            f'<path class="{kind}" d="M{at} {top:.1f}h{column}V{bottom:.1f}h-{column}z"/>'
            for kind, (top, bottom) in zip(("bad", "known", "good"), itertools.pairwise(tops), strict=True)
            if bottom > top
        )
        said = f"{name}: {passed} of {declared} passed" + (f", {red} red" if red else "")
        said += "" if finished else "; the night did not finish"
        kind = "" if finished else ' class="cut"'
        parts.append(f"<g{kind}><title>{escape(said)}</title>{column_parts}</g>")
    width = len(nights) * (column + gap) - gap
    return _svg("nights", width, height, f"passed case-runs of those planned, over {len(nights)} nights", parts)


def _svg(kind: str, width: float, height: float, label: str, parts: Iterable[str], *, stretch: bool = False) -> Markup:
    ratio = ' preserveAspectRatio="none"' if stretch else ""
    return Markup(
        f'<svg class="plot {kind}" role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"{ratio}>{"".join(parts)}</svg>'
    )
