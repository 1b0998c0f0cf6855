"""Experiments for an exception: it may not be raised without one feature, or if only one mode uses the instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..cases.case import Case
from ..steps.numerics import Numerics
from ..steps.schedule import Schedule, make_schedule
from .changed_case import FEATURES
from .lone_step import least_bucket, lone_step
from .rerun import Rerunner

_WITHOUT: tuple[tuple[Callable[[Case], Case], Callable[[Case], str]], ...] = (
    (
        lambda case: replace(case, layers=replace(case.layers, first=0)),
        lambda case: (
            "layer_id is used as an index, but the first layer need not have id 0: the ids of this case's layers "
            f"begin at {case.layers.first}; if they begin at 0, nothing is raised"
        ),
    ),
    (
        FEATURES["shapes"],
        lambda case: (
            "something is sized or planned by the heads of another layer, as by the first one's: nothing is raised "
            "if all layers have the same heads"
        ),
    ),
    (
        FEATURES["groups"],
        lambda case: "nothing is raised if all layers share one KV group",
    ),
    (
        FEATURES["sinks"],
        lambda case: "nothing is raised without sinks (layer.sinks)",
    ),
    (
        FEATURES["cap"],
        lambda case: "nothing is raised without a soft cap (layer.logit_cap)",
    ),
    (
        FEATURES["window"],
        lambda case: "nothing is raised without a sliding window (layer.sliding_window_size)",
    ),
    (
        FEATURES["fp8"],
        lambda case: "nothing is raised with a KV pool of the model's dtype",
    ),
)
"""Pairs of a feature to remove, and the hint if nothing is raised without it."""


OVERTAKEN = (
    "the plan of the next step overwrites memory that a step in the queue still reads: if the host waits for the "
    "device before that plan, the step passes. Probably one pinned buffer serves every plan: alternate two, and "
    "before one is filled again, wait for an event recorded after the last copy from it"
)
"""Reason if the only change is a wait of the host before each plan that would overtake a step."""


def plans_overtake(schedule: Schedule) -> bool:
    """True if steps of the case are planned while the device may not have begun the step before."""
    return "overlap_scheduling" in schedule.case.variants


def explain_raised(rerunner: Rerunner, schedule: Schedule, *, in_graph: bool) -> str:
    """Find a hint: one change with which nothing is raised; else nothing. ``in_graph``: the exception was raised in a
    graph run. If the first eager step raises too, that step is examined.
    """
    case = schedule.case
    if case.rounds or case.instance_of is not None:
        return ""
    if rerunner.runs_eagerly(schedule) and _eager_raises(rerunner, schedule):
        if plans_overtake(schedule) and rerunner.eager(schedule, schedule.steps[0], wait_before_plans=True):
            return OVERTAKEN
        return _without(_eager_raises, rerunner, schedule)
    if in_graph and _graph_raises(rerunner, schedule):
        if plans_overtake(schedule) and rerunner.graph(schedule, wait_before_plans=True):
            return OVERTAKEN
        if case.multi_mode:
            return ""
        return _without(_graph_raises, rerunner, schedule) or _of_padding(rerunner, schedule)
    if case.multi_mode:
        return (
            "another mode raises when it runs by itself, or state of one mode, such as metadata by batch size only, is "
            "used for "
            "another, or a co-resident instance contributes to it: on an instance by itself nothing is raised"
        )
    return ""


def explain_freed(rerunner: Rerunner, schedule: Schedule) -> str:
    """Find a hint for a graph whose memory is freed, but not if only one mode uses the instance; else nothing.
    ``schedule``: the schedule of the case's own mode.
    """
    case = schedule.case
    if not case.multi_mode or case.rounds or case.instance_of is not None or _graph_raises(rerunner, schedule):
        return ""
    return (
        "graphs of two modes share it, and the capture of one replaces what the other reads: on an instance that runs "
        f"only {case.mode} nothing is freed. Probably metadata or graphs are kept by batch size only; keep them by "
        "mode and batch size"
    )


def _of_padding(rerunner: Rerunner, schedule: Schedule) -> str:
    """Hint for a replay that raises in a larger bucket, but not in one without padded requests."""
    for step in schedule.steps:
        least = least_bucket(schedule, step)
        if not step.requests or step.bucket <= least:
            continue
        if not _graph_raises(rerunner, lone_step(schedule, step, step.bucket)):
            continue
        if _graph_raises(rerunner, lone_step(schedule, step, least)):
            return ""
        return (
            f"padded requests cause it: with {step.bs} live request{'s' * (step.bs > 1)} in a bucket of {step.bucket} "
            f"it is raised, and in a bucket of {least} it is not. A padded request may write only its own rows"
        )
    return ""


def _eager_raises(rerunner: Rerunner, schedule: Schedule) -> bool:
    return rerunner.eager(schedule, schedule.steps[0]) is None


def _graph_raises(rerunner: Rerunner, schedule: Schedule) -> bool:
    return rerunner.graph(schedule) is None


def _without(raises: Callable[[Rerunner, Schedule], bool], rerunner: Rerunner, schedule: Schedule) -> str:
    case = schedule.case
    for change, reported in _WITHOUT:
        other = change(case)
        if other == case or not rerunner.declared(other):
            continue
        changed = make_schedule(other, Numerics(lse_dtype=schedule.lse_dtype))
        if not raises(rerunner, changed):
            return reported(case)
    return ""
