"""Asking a backend which keys it used: with Q = K = 0 all keys weigh the same, and one-hot values name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cases.schedule import Schedule
from .checks.numeric import stacked, wrong_requests
from .checks.observation import Observation
from .oracle.attention import windowed
from .oracle.expect import expect
from .rerun import Bench

__all__ = ["Footprint", "attended", "ranges"]

_MAX_PASSES = 6


@dataclass(frozen=True)
class Footprint:
    """The keys that one row of one request used, and those that it should have used."""

    request: int
    row: int
    """Row inside the request."""
    used: frozenset[int]
    wanted: frozenset[int]
    doubled: frozenset[int]
    """Keys that counted more than once."""
    looked_at: frozenset[int]
    """Keys that were asked for; long requests are asked at both ends."""
    foreign: float
    """Part of the weight that went to keys that are not this request's (0 when unknown)."""

    @property
    def text(self) -> str:
        """One line for a report."""
        name = f"request {self.request}" + (f" row {self.row}" if self.row else "")
        if self.used == self.wanted and not self.doubled and self.foreign < 0.02:
            return f"{name} used the right keys, {ranges(sorted(self.used))}"
        text = f"{name} used keys {ranges(sorted(self.used))}, should be {ranges(sorted(self.wanted))}"
        if self.doubled:
            text += f"; keys {ranges(sorted(self.doubled))} counted more than once"
        if self.foreign >= 0.02:
            text += f"; {100 * self.foreign:.0f}% of its weight went to keys that are not its own"
        return text


def ranges(keys: Sequence[int]) -> str:
    """[0, 1, 2, 7] -> ``0..2, 7``; nothing is ``none``."""
    runs: list[list[int]] = []
    for key in keys:
        if runs and runs[-1][1] == key - 1:
            runs[-1][1] = key
        else:
            runs.append([key, key])
    shown = [f"{a}..{b}" if a != b else str(a) for a, b in runs[:6]]
    return ", ".join(shown) + (f" and {len(runs) - 6} more runs" if len(runs) > 6 else "") or "none"


def attended(bench: Bench, schedule: Schedule, observed: Observation, *, in_graph: bool) -> Footprint | None:
    """Which keys the first wrong row used. None when the backend will not say (it raises, or gives NaN)."""
    expected = expect(schedule, observed.step)
    wrong = wrong_requests(observed, expected)
    if not wrong:
        return None
    request = wrong[0]
    out = stacked(observed, expected)
    bad = ~((out.double() - expected.attention).abs() <= expected.attention_limit)
    rows = (bad.permute(1, 0, 2, 3).flatten(1).any(-1) & (expected.data.row_request == request)).nonzero().flatten()
    if not len(rows):
        return None
    flat = int(rows[0])
    row, layer = int(expected.data.row_offset[flat]), int(bad[:, flat].flatten(1).any(-1).nonzero()[0])
    dim = schedule.case.head_dim
    plan = observed.step.requests[request]
    length = plan.prefix + plan.new
    starts = list(range(0, length, dim))
    if len(starts) > _MAX_PASSES:
        starts = starts[: _MAX_PASSES // 2] + starts[-_MAX_PASSES // 2 :]
    weights: dict[int, float] = {}
    for start in starts:
        answer = _ask(bench, schedule, observed, f"probe.{request}.{start}", in_graph=in_graph)
        if answer is None:
            return None
        values = stacked(answer, expected)[layer, flat, 0]
        if not values.isfinite().all():
            return None
        for channel in range(min(dim, length - start)):
            weights[start + channel] = float(values[channel])
    window = schedule.case.window if layer == 0 else -1
    visible = windowed(expected.data.visible, expected.data, window)[request, row]
    return _read(request, row, weights, frozenset(int(k) for k in visible.nonzero().flatten()), schedule.case.sinks)


def _read(request: int, row: int, weights: dict[int, float], wanted: frozenset[int], sinks: bool) -> Footprint:
    looked_at = frozenset(weights)
    top = max(weights.values(), default=0.0)
    used = frozenset(k for k, w in weights.items() if w > top / 4)
    typical = sorted(weights[k] for k in used)[len(used) // 2] if used else 0.0
    doubled = frozenset(k for k in used if weights[k] > 1.5 * typical)
    everything = looked_at >= wanted
    foreign = max(0.0, 1.0 - sum(weights.values())) if everything and not sinks else 0.0
    return Footprint(request, row, used, wanted & looked_at, doubled, looked_at, foreign)


def _ask(
    bench: Bench, schedule: Schedule, observed: Observation, pattern: str, *, in_graph: bool
) -> Observation | None:
    if not in_graph:
        return bench.eager(schedule, observed.step, pattern=pattern)
    answer = bench.graph(schedule, pattern=pattern)
    if answer is None:
        return None
    return next((seen for seen in answer[0] if seen.step is observed.step), None)
