"""Experiment for a replay that is wrong by itself: it is run again in a graph that was captured with the same batch."""

from __future__ import annotations

from dataclasses import replace

from ..cases.features.server.table import variant_of
from ..checks import Comparison
from ..contract import ForwardMode
from ..families.expected import expect
from ..steps.schedule import Schedule, make_schedule
from .changed_case import FEATURES
from .rerun import Rerunner

OVERFLOWS = (
    "an address overflows 32 bits, only in the graph, since a slot or a page times a stride needs 64 (.to(tl.int64), "
    "int64_t): the case passes with a small KV pool and fails if the pool has elements beyond 2^31"
)

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
    if variant_of(alone.case).pool_elements and _right_in_a_small_pool(rerunner, alone):
        return OVERFLOWS
    # The graph of a batch of prompts is captured with other row counts.
    run = None if alone.case.mode is ForwardMode.EXTEND else rerunner.graph(alone, step_at_capture=True)
    observed = run.observed[-1][1] if run is not None and run.observed else None
    if observed is None:
        return _UNKNOWN
    if Comparison(observed, expect(alone, observed.step)).right:
        return _OF_CAPTURE
    # A mask that a server makes for each step was still that of a dummy batch.
    branching = any(request.tree is not None and request.tree.topk > 1 for request in observed.step.requests)
    return _UNKNOWN if branching else _NOT_OF_CAPTURE


def _right_in_a_small_pool(rerunner: Rerunner, alone: Schedule) -> bool:
    """True if the first step of the case is wrong in a graph, and right in one with a small pool."""
    right = []
    for case in (alone.case, FEATURES["big pool"](alone.case)):
        if not rerunner.declared(case):
            return False
        schedule = make_schedule(case, alone.numerics)
        step = schedule.steps[0]
        run = rerunner.graph(replace(schedule, buckets=(step.bucket,), steps=(step,)))
        observed = run.observed[-1][1] if run is not None and run.observed else None
        right.append(observed is not None and Comparison(observed, expect(schedule, step)).right)
    return right == [False, True]


def keeps_capture_values(reason: str) -> bool | None:
    """Answer of the experiment that gave ``reason``; None if there was none."""
    return {_OF_CAPTURE: True, _NOT_OF_CAPTURE: False}.get(reason)
