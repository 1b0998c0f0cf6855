"""Checks of capabilities: the backend refuses undeclared contexts, and declared ones work."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.features.table import FEATURES
from ..contract import AttentionBackend, BackendContext, Capabilities, Unsupported
from ..results.finding import Finding
from ..steps.schedule import Schedule
from .evaluation import Evaluation, in_eager, in_graphs
from .failures import is_ctrl_c, reason_of, site_of


def undeclared_contexts(declared: Capabilities, context: BackendContext) -> Iterator[tuple[str, BackendContext]]:
    """Contexts that differ from ``context`` in one undeclared value, with the name of that value."""
    found = (outside(declared, context) for feature in FEATURES for outside in feature.undeclared)
    yield from (each for each in found if each is not None)


def refuses_undeclared(
    backend_class: type[AttentionBackend],
    schedule: Schedule,
    context: BackendContext,
    declared: Capabilities | None = None,
) -> list[Finding]:
    """Construct the backend for one undeclared context, another one in each case: it must raise ``Unsupported``.

    ``context``: the context of the case's own instance, which was accepted. ``declared``: the capabilities that the
    judge received; None: the class's own.
    """
    contexts = list(undeclared_contexts(backend_class.capabilities if declared is None else declared, context))
    if not contexts:
        return []
    name, outside = contexts[schedule.case.derived("undeclared", len(contexts))]
    try:
        backend_class(outside)
    except Unsupported:
        return []
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        what = f"and the constructor raised {type(error).__name__} instead of Unsupported: {reason_of(error)}"
        where = site_of(error, "constructor")
    else:
        what, where = "yet the constructor accepted it", ""
    return [
        Finding(
            "refuses-undeclared",
            f"{name} is not declared, {what}",
            where=where,
            hint="call super().__init__(context) first: it compares the context with the capabilities",
        )
    ]


EVALUATIONS = (
    Evaluation(
        "no-host-lengths",
        applies=lambda declared, execution: not declared.needs.cpu_seq_lens,
    ),
    Evaluation(
        "compiles-once",
        applies=in_eager,
    ),
    Evaluation(
        "capabilities-honest",
        applies=in_graphs,
    ),
    Evaluation(
        "refuses-undeclared",
        applies=lambda declared, execution: in_eager(declared, execution) or not declared.eager,
    ),
)
