"""Experiment for backends that declare strided heads: the step may be right if the heads of k and v are contiguous."""

from __future__ import annotations

from ..checks import Comparison
from ..checks.misplaced import STRIDED_HEADS
from ..families.expected import expect
from ..steps.schedule import Schedule
from .rerun import Rerunner


def blame_strided_heads(rerunner: Rerunner, schedule: Schedule) -> str:
    """Return a hint if the schedule's first step passes with contiguous heads and fails with strided ones.
    ``schedule``: the schedule of a case whose k and v have strided heads if ``takes_strided_heads`` is declared.
    """
    if not _right(rerunner, schedule, contiguous_heads=True) or _right(rerunner, schedule, contiguous_heads=False):
        return ""
    return f"the step passes if the heads of k and v are contiguous: {STRIDED_HEADS}"


def _right(rerunner: Rerunner, schedule: Schedule, *, contiguous_heads: bool) -> bool:
    if rerunner.runs_eagerly(schedule):
        observed = rerunner.eager(schedule, schedule.steps[0], contiguous_heads=contiguous_heads)
        seen = [] if observed is None else [observed]
    else:
        run = rerunner.graph(schedule, contiguous_heads=contiguous_heads)
        seen = [] if run is None else [observed for _, observed in run.observed]
    return bool(seen) and all(Comparison(each, expect(schedule, each.step)).right for each in seen)
