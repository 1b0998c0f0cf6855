"""The forward mode."""

from __future__ import annotations

from dataclasses import replace

from ...contract import BackendContext, Capabilities, ForwardMode
from .dimension import Asked, Dimension, Without


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    missing = frozenset(ForwardMode) - declared.eager - declared.graph
    if not missing:
        return None
    mode = min(missing)
    return f"mode {mode}", replace(context, modes=frozenset({mode}))


MODE = Dimension(
    name="mode",
    fields=Without("It follows from the rows."),
    words=Without("Every id begins with the mode, whose name may have the dashes that separate words."),
    describe=lambda case: {"mode": case.mode.value},
    declared=(
        Asked(lambda case: f"mode {case.mode}", lambda declared, case: case.mode in declared.eager | declared.graph),
    ),
    fit=Without("Rows have a meaning in one mode only, so no other mode is the nearest."),
    combined=Without("Cases of each mode are combined by themselves."),
    values=Without("Each mode has its own covering array."),
    covered=Without("A mode that is declared has cases."),
    simpler=Without("A failing case is made small in its own mode."),
    undeclared=(_undeclared,),
    random=Without("The caller who draws a case names the mode."),
    varies="instance",
    apply=Without("Each mode is a file of runner_modes/."),
)
