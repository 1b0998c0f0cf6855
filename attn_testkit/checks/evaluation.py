"""Functions of a check: in which case-runs it applies, which cases show it, and its evaluation of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cases.case import Case
from ..contract import Capabilities, Execution
from ..results.finding import Finding
from ..steps.schedule import Schedule
from .comparison import Comparison

Run = Callable[[Comparison, Schedule, Capabilities], list[Finding]]
"""A function that evaluates one observed step, with the step's schedule."""


def always(declared: Capabilities, execution: Execution) -> bool:
    """True for every case-run."""
    return True


def in_eager(declared: Capabilities, execution: Execution) -> bool:
    """True for eager case-runs."""
    return execution is Execution.EAGER


def in_graphs(declared: Capabilities, execution: Execution) -> bool:
    """True for graph case-runs."""
    return execution is Execution.GRAPH


@dataclass(frozen=True)
class Evaluation:
    """The functions of one check. ``results/checks.py`` has its texts and its place."""

    check: str
    """The check's id."""
    applies: Callable[[Capabilities, Execution], bool] = always
    shown_by: Callable[[Case], bool] = lambda case: True
    """True if a case can show the failure: a single request has no other requests that could change its bits."""
    run: Run | None = None
    """The function that evaluates a step; None if a run, a comparison of runs, or diagnosis finds failures."""
