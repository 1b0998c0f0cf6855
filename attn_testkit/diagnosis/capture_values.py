"""Experiment for a replay that is wrong by itself: it is run again in a graph that was captured with the same batch."""

from __future__ import annotations

from ..checks import Comparison
from ..contract import ForwardMode
from ..families.expected import expect
from ..steps.schedule import Schedule
from .rerun import Rerunner

__all__ = ["keeps_capture_values", "reason_of_a_replay"]

_OF_CAPTURE = (
    "the graph still uses a value from capture time (a length, stride, grid size or pointer): captured with this "
    "batch, it is right"
)
_NOT_OF_CAPTURE = (
    "only the graph is wrong, even if it is captured with this batch: look at what is the same in every capture (a "
    "maximum, a grid, an offset, a stride), at the plan for a replay, and at padded rows"
)
_UNKNOWN = (
    "only the graph is wrong: probably a value from capture time (a length, stride, grid size or pointer), or the plan "
    "for a replay"
)


def reason_of_a_replay(rerunner: Rerunner, alone: Schedule) -> str:
    """Reason of a replay that is right in eager mode. ``alone``: a schedule that has only its step, in its bucket."""
    # A batch of prompts is captured with counts of its own.
    run = None if alone.case.mode is ForwardMode.EXTEND else rerunner.graph(alone, step_at_capture=True)
    observed = run.observed[-1][1] if run is not None and run.observed else None
    if observed is None:
        return _UNKNOWN
    return _OF_CAPTURE if Comparison(observed, expect(alone, observed.step)).right else _NOT_OF_CAPTURE


def keeps_capture_values(reason: str) -> bool | None:
    """Answer of the experiment that gave ``reason``; None if there was none."""
    return {_OF_CAPTURE: True, _NOT_OF_CAPTURE: False}.get(reason)
