"""Evaluation of one observed step: which checks, in which order, and which failures are consequences."""

from __future__ import annotations

from ..contract import Capabilities
from ..results.finding import Finding
from ..steps.schedule import Schedule
from . import BEFORE_OUTPUTS, CHECKS, NUMERIC
from .check import Check
from .comparison import Comparison

_ORDER = (
    "writes-own-state",
    "verify-keeps-state",
    "state-counts-tokens",
    "writes-own-kv",  # wrong writes make wrong numbers, and never the other way round
    "index-stored",  # a wrong index key makes a wrong selection, and that wrong numbers
    "selection-well-formed",
    "selects-best",
    "log-sum-exp",  # a wrong one makes a wrong merge
    "output-written",
    "finite",
    "matches-oracle",
    "keys-counted-once",
    "state-matches-oracle",
    "conv-window-exact",
    "graph-matches-eager",
    "mode-outputs",
    "padding-finite",
    "inputs-unchanged",
    "addresses-stable",
)
"""Checks in the order of evaluation, causes before consequences: the first finding is diagnosed and read."""


def evaluate_step(comparison: Comparison, schedule: Schedule, declared: Capabilities) -> list[Finding]:
    """Find everything wrong with one step, the most telling first.

    Consequences of wrong attention outputs are not reported: checks ``behind_outputs`` are left out.
    """
    found: list[Finding] = []
    for check in map(CHECKS.__getitem__, _ORDER):
        silenced = check.id in (*BEFORE_OUTPUTS, *NUMERIC) and any(each.check in BEFORE_OUTPUTS for each in found)
        silenced = silenced or not check.shown_by(schedule.case)
        if not silenced and not (check.behind_outputs and _outputs_wrong(found)):
            found += _run(check, comparison, schedule, declared)
    return found


def _outputs_wrong(found: list[Finding]) -> bool:
    return any(finding.check in (*NUMERIC, *BEFORE_OUTPUTS) for finding in found)


def _run(check: Check, comparison: Comparison, schedule: Schedule, declared: Capabilities) -> list[Finding]:
    assert check.run is not None
    return check.run(comparison, schedule, declared)
