"""Experiment for emulated Triton kernels: fewer programs, as many as the step has requests or rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..checks import Comparison
from ..families.expected import expect
from ..steps.schedule import Schedule, Step
from .rerun import Rerunner

_AXES = 3
_MOST_RUNS = 4
"""Number of experiments with one failure."""


def programs_of_nobody(rerunner: Rerunner, schedule: Schedule, step: Step, *, in_graph: bool) -> str:
    """Hint if the step is right once no launch has more programs than requests, or than rows, along an axis."""
    runs = 0
    for unit, most in (("request", step.bs), ("row", step.tokens)):
        for axis in range(_AXES):
            if not most or not _larger(rerunner.grids, axis, most) or runs == _MOST_RUNS:
                continue
            runs += 1
            if _right(rerunner, schedule, step, (axis, most), in_graph=in_graph):
                name, size = _larger(rerunner.last_grids, axis, most)[-1]
                which = f"programs {most}..{size - 1}" if size > most + 1 else f"program {most}"
                belong = "belong" if size > most + 1 else "belongs"
                return (
                    f"{which} of kernel {name} along axis {axis} {belong} to no {unit}, and what they write spoils the "
                    f"result: the step has {most} {unit}{'s' if most > 1 else ''}, and the result is right with {most}"
                )
    return ""


def _larger(grids: Iterable[tuple[str, tuple[int, ...]]], axis: int, most: int) -> list[tuple[str, int]]:
    return [(name, grid[axis]) for name, grid in grids if len(grid) > axis and grid[axis] > most]


def _right(
    rerunner: Rerunner, schedule: Schedule, step: Step, most_programs: tuple[int, int], *, in_graph: bool
) -> bool:
    if not in_graph:
        observed = rerunner.eager(schedule, step, most_programs=most_programs)
    else:
        alone = replace(schedule, buckets=(step.bucket,), steps=(step,))
        run = rerunner.graph(alone, most_programs=most_programs)
        observed = run.observed[-1][1] if run is not None and run.observed else None
    return observed is not None and Comparison(observed, expect(schedule, step)).right
