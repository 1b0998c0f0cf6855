"""The functions of the checks: one file per kind of check, on host data, without pytest.

``results/checks.py`` is the table of all checks. Each module here has the functions of some of them in ``EVALUATIONS``,
which are found and joined by id.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module

from ..cases.case import Case
from ..contract import Capabilities, Execution
from ..results.checks import BEFORE_OUTPUTS, CHECKS, NUMERIC, REPORTED_INSTEAD, Check, Stage
from .comparison import Comparison
from .evaluation import Evaluation

__all__ = [
    "BEFORE_OUTPUTS",
    "CHECKS",
    "NUMERIC",
    "REPORTED_INSTEAD",
    "Check",
    "Comparison",
    "Evaluation",
    "Stage",
    "evaluated",
    "evaluations",
]


@cache
def evaluations() -> Mapping[str, Evaluation]:
    """Functions of each check, by id, in the order of the table."""
    return _joined(_found())


def _found() -> Iterator[Evaluation]:
    for module in sorted(each.name for each in pkgutil.iter_modules(__path__)):
        yield from getattr(import_module(f"{__name__}.{module}"), "EVALUATIONS", ())


def _joined(found: Iterable[Evaluation]) -> dict[str, Evaluation]:
    """Evaluations by id, one for each check. Raises ``ValueError`` for an evaluation whose check is not in the table,
    and for a check of a step with no function or with two.
    """
    by_id: dict[str, Evaluation] = {}
    for each in found:
        if each.check not in CHECKS:
            raise ValueError(f"an evaluation of {each.check!r}, which results/checks.py does not have")
        if each.check in by_id:
            raise ValueError(f"two evaluations of {each.check!r}")
        by_id[each.check] = each
    joined = {check: by_id.get(check, Evaluation(check)) for check in CHECKS}
    for check in CHECKS.values():
        if bool(check.place) != bool(joined[check.id].run):
            raise ValueError(f"{check.id} has {'a place' if check.place else 'no place'} in the evaluation of a step")
    return joined


def evaluated(
    declared: Capabilities,
    execution: Execution,
    stage: Stage,
    failed: Collection[str],
    case: Case | None = None,
    not_compared: Collection[str] = (),
    *,
    steps_right: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of the checks that were evaluated, and of those that apply but could not be evaluated, each in reading order.

    ``stage``: the last stage that the case-run reached. ``failed``: ids of its findings; each of them counts as
    evaluated, and so do ids that this kit does not know. If attention outputs are among them, checks ``behind_outputs``
    were not evaluated.
    ``case``: leaves out checks that the case cannot show. Checks that need an eager run are not evaluated in a mode
    without one. ``not_compared``: ids of checks that had nothing to compare with and were therefore not evaluated.
    ``steps_right``: true if the outputs of all steps are right, so that a wrong one is that of a warm-up.
    """
    outputs_wrong = not steps_right and any(check in NUMERIC or check in REPORTED_INSTEAD for check in failed)
    selected_wrong = [BEFORE_OUTPUTS.index(check) for check in failed if check in BEFORE_OUTPUTS]
    behind = {*BEFORE_OUTPUTS[min(selected_wrong) :], *NUMERIC} if selected_wrong else set()
    done: list[str] = []
    not_done: list[str] = []
    for check in CHECKS.values():
        how = evaluations()[check.id]
        if check.id in failed:
            done.append(check.id)
        elif how.applies(declared, execution) and (case is None or how.shown_by(case)):
            no_eager = case is not None and case.mode not in declared.eager
            wrong = outputs_wrong or bool(behind)
            alone = check.id in not_compared or (check.against_eager and no_eager)
            hidden = check.id in behind or (check.behind_outputs and wrong) or alone
            (done if stage >= check.evaluated_from and not hidden else not_done).append(check.id)
    return (*done, *sorted(set(failed) - CHECKS.keys())), tuple(not_done)
