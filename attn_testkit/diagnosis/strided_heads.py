"""Is a step right when the heads of k and v lie one behind the other? Asked of backends that claim strided ones."""

from __future__ import annotations

from ..cases.schedule import Schedule
from ..checks import Judgement
from ..checks.misplaced import STRIDED_HEADS
from ..oracle.expect import expect
from .rerun import Rerunner

__all__ = ["blame_strided_heads"]


def blame_strided_heads(rerunner: Rerunner, schedule: Schedule) -> str:
    """A hint, if the schedule's first step is right with contiguous heads and wrong with strided ones; else nothing.

    ``schedule``: of a case whose k and v have strided heads for who claims ``takes_strided_heads``.
    """
    if not _right(rerunner, schedule, contiguous_heads=True) or _right(rerunner, schedule, contiguous_heads=False):
        return ""
    return f"right where the heads of k and v lie one behind the other: {STRIDED_HEADS}"


def _right(rerunner: Rerunner, schedule: Schedule, *, contiguous_heads: bool) -> bool:
    if rerunner.runs_eagerly(schedule):
        observed = rerunner.eager(schedule, schedule.steps[0], contiguous_heads=contiguous_heads)
        seen = [] if observed is None else [observed]
    else:
        run = rerunner.graph(schedule, contiguous_heads=contiguous_heads)
        seen = [] if run is None else [observed for _, observed in run.observed]
    return bool(seen) and all(Judgement(each, expect(schedule, each.step)).right for each in seen)
