"""The checks: one file per kind of check, plain functions on host data, no pytest."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..cases.case import Case
from ..contract import Capabilities, Execution
from . import capabilities as _capabilities
from . import (
    counted_once,
    failures,
    graphs,
    indexer,
    log_sum_exp,
    lossless,
    memory,
    numeric,
    outputs,
    sameness,
    state,
    states,
)
from .check import Check, Stage
from .comparison import Comparison

__all__ = ["BEFORE_OUTPUTS", "CHECKS", "NUMERIC", "REPORTED_INSTEAD", "Check", "Comparison", "Stage", "evaluated"]

_KINDS = (
    failures,
    numeric,
    counted_once,
    log_sum_exp,
    outputs,
    memory,
    states,
    indexer,
    graphs,
    state,
    _capabilities,
    sameness,
    lossless,
)

CHECKS: Mapping[str, Check] = {check.id: check for kind in _KINDS for check in kind.CHECKS}
"""Checks by id, in the order in which their failures are worth reading."""

NUMERIC = ("output-written", "finite", "matches-oracle", "keys-counted-once")
"""Ids of the checks of attention outputs. Diagnosis explains their failures, and they silence failures that follow."""

BEFORE_OUTPUTS = ("index-stored", "selection-well-formed", "selects-best")
"""Ids of the checks of an indexer, in order: a failure of one silences the others and those of attention outputs."""

REPORTED_INSTEAD = (
    "reads-own-kv",
    "reads-own-state",
    "captures-cleanly",
    "replay-follows-batch",
    "addresses-stable",
    "padding-inert",
    "buckets-independent",
    "steps-independent",
)
"""Ids under which diagnosis reports wrong attention outputs once it knows their cause."""


def evaluated(
    declared: Capabilities,
    execution: Execution,
    stage: Stage,
    failed: Collection[str],
    case: Case | None = None,
    not_compared: Collection[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids that were evaluated, and ids that apply and could not be evaluated, each in reading order.

    ``stage``: how far the case-run came. ``failed``: ids of its findings; each of them counts as evaluated, as do ids
    that this kit does not know. If attention outputs are among them, checks ``behind_outputs`` were not evaluated.
    ``case``: leaves out checks that the case cannot show. Checks that need an eager run are not evaluated in a mode
    without one. ``not_compared``: ids of checks that had nothing to compare with, and so were not evaluated.
    """
    outputs_wrong = any(check in NUMERIC or check in REPORTED_INSTEAD for check in failed)
    selected_wrong = [BEFORE_OUTPUTS.index(check) for check in failed if check in BEFORE_OUTPUTS]
    behind = {*BEFORE_OUTPUTS[min(selected_wrong) :], *NUMERIC} if selected_wrong else set()
    done: list[str] = []
    not_done: list[str] = []
    for check in CHECKS.values():
        if check.id in failed:
            done.append(check.id)
        elif check.applies(declared, execution) and (case is None or check.shown_by(case)):
            no_eager = case is not None and case.mode not in declared.eager
            wrong = outputs_wrong or bool(behind)
            alone = check.id in not_compared or (check.against_eager and no_eager)
            hidden = check.id in behind or (check.behind_outputs and wrong) or alone
            (done if stage >= check.evaluated_from and not hidden else not_done).append(check.id)
    return (*done, *sorted(set(failed) - CHECKS.keys())), tuple(not_done)
