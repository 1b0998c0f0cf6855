"""The forward mode."""

from __future__ import annotations

from dataclasses import replace

from ...contract import BackendContext, Capabilities, ForwardMode
from .feature import Asked, Feature, Trait, Without


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    missing = frozenset(ForwardMode) - declared.eager - declared.graph
    if not missing:
        return None
    mode = min(missing)
    return f"mode {mode}", replace(context, modes=frozenset({mode}))


_OF_DRAFT_MODELS = (ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)

MODE = Feature(
    name="mode",
    order=10,
    fields=Without("It follows from the rows."),
    traits=(
        Trait("draft-decode", lambda case: case.mode is ForwardMode.DRAFT_DECODE),
        Trait("prompts", lambda case: case.mode is ForwardMode.EXTEND),
        Trait("no prompts", lambda case: case.mode is not ForwardMode.EXTEND),
        Trait("drafts to verify", lambda case: case.tree is not None),
        Trait("no draft to verify", lambda case: case.tree is None),
        Trait("rows of a draft model", lambda case: case.mode in _OF_DRAFT_MODELS),
        Trait(
            "no prompts or drafts to verify",
            lambda case: case.mode not in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY),
        ),
    ),
    words=Without("Every id begins with the mode. The name of a mode may contain dashes, which also separate words."),
    describe=lambda case: {"mode": case.mode.value},
    declared=(
        Asked(lambda case: f"mode {case.mode}", lambda declared, case: case.mode in declared.eager | declared.graph),
    ),
    fit=Without("Rows have a meaning in one mode only, so no other mode is the nearest."),
    values=Without("Each mode has its own covering array."),
    covered=Without("Every declared mode has cases."),
    simpler=Without("A failing case is minimized in its own mode."),
    undeclared=(_undeclared,),
    random=Without("The caller that draws a case passes the mode."),
    varies="instance",
    apply=Without("Each mode is a file of runner_modes/."),
)
