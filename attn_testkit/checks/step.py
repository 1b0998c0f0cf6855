"""Evaluation of one observed step: which checks, in which order, and which failures are consequences."""

from __future__ import annotations

from ..contract import Capabilities
from ..results.checks import BEFORE_OUTPUTS, IN_A_STEP, NUMERIC
from ..results.finding import Finding
from ..steps.schedule import Schedule
from . import evaluations
from .comparison import Comparison


def evaluate_step(comparison: Comparison, schedule: Schedule, declared: Capabilities) -> list[Finding]:
    """Find everything wrong with one step, the most telling first.

    Consequences of wrong attention outputs are not reported: checks ``behind_outputs`` are left out.
    """
    found: list[Finding] = []
    for check in IN_A_STEP:
        how = evaluations()[check.id]
        silenced = check.role in ("selection", "outputs") and any(each.check in BEFORE_OUTPUTS for each in found)
        silenced = silenced or not how.shown_by(schedule.case)
        if not silenced and not (check.behind_outputs and _outputs_wrong(found)):
            assert how.run is not None
            found += how.run(comparison, schedule, declared)
    return found


def _outputs_wrong(found: list[Finding]) -> bool:
    return any(finding.check in (*NUMERIC, *BEFORE_OUTPUTS) for finding in found)
