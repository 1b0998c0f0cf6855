"""The step in which a case fails, as a separate case with the batch of that step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..cases.case import Case
from ..cases.rows import Extend, Verify, room_for
from ..results.case_result import CaseResult
from ..steps.schedule import Step, make_schedule


def failing_step(case: Case, result: CaseResult) -> Step | None:
    """The first replay that a result names, if it comes after the case's own batch; None for anything else."""
    for finding in result.findings:
        if found := re.search(r"\breplay (\d+) of \d+", finding.step):
            steps = make_schedule(case).steps
            number = int(found[1])
            return steps[number - 1] if 1 < number <= len(steps) and steps[number - 1].requests else None
    return None


def case_of_step(case: Case, step: Step) -> Case | None:
    """``case`` with the requests, rows, slots, padding and data of ``step``; None if no case id can express it."""
    changes: dict[str, Any] = {
        "prefixes": tuple(request.decoder_prefix for request in step.requests),
        "bucket": step.bucket,
        "layout": step.layout,
        "padding": step.padding if step.bs < step.bucket else "prod",
        "data": step.data,
    }
    rows, tree = case.rows, step.requests[0].tree
    if isinstance(rows, Extend):
        new = tuple(request.new for request in step.requests)
        changes["rows"] = replace(rows, new=new, room=max(rows.room, room_for(new)), chunks=1)
    elif isinstance(rows, Verify) and tree is not None:
        changes["rows"] = Verify(tree)
    else:
        changes["rows"] = rows.counted(tuple(request.accepted for request in step.requests))
    try:
        return case.with_changes(**changes)
    except ValueError:
        return None
