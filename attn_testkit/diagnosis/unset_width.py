"""Experiment for backends that declare ``takes_unset_width``: the graph may be right if its capture has the width."""

from __future__ import annotations

from ..checks import Comparison
from ..contract import ForwardMode
from ..families.expected import expect
from ..steps.schedule import Schedule
from .rerun import Rerunner

WIDTH_OF = {
    ForwardMode.TARGET_VERIFY: "num_draft_tokens",
    ForwardMode.DRAFT_EXTEND: "speculative_num_steps + 1",
    ForwardMode.DRAFT_EXTEND_V2: "speculative_num_steps + 1",
}
"""Mode whose ``spec_info`` has ``num_tokens_per_req`` -> where else a backend finds the width, in its context."""


def blame_unset_width(rerunner: Rerunner, schedule: Schedule) -> str:
    """Return a hint if the graphs of the schedule pass with the width at capture and fail without it; else nothing.
    ``schedule``: the schedule of a mode in ``WIDTH_OF``, whose captures have 0 or -1 as ``num_tokens_per_req``.
    """
    if not _right(rerunner, schedule, width_at_capture=True) or _right(rerunner, schedule, width_at_capture=False):
        return ""
    case = schedule.case
    unset = -1 if case.derived("num-tokens-per-req") else 0
    return (
        f"num_tokens_per_req is {unset} while this graph is captured (takes_unset_width is declared); the step passes "
        f"with {case.width}. Take the width from the context ({WIDTH_OF[case.mode]}), or do not declare "
        "it"
    )


def _right(rerunner: Rerunner, schedule: Schedule, *, width_at_capture: bool) -> bool:
    run = rerunner.graph(schedule, width_at_capture=width_at_capture)
    return run is not None and all(
        Comparison(observed, expect(schedule, observed.step)).right for _, observed in run.observed
    )
