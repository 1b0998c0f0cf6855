"""Comparison of what a backend declares with a case that was not made by the catalogue."""

from __future__ import annotations

from ..contract import Capabilities
from .case import Case
from .co_residents import declared_co_residents
from .features.context import CONTEXT
from .features.server.table import on_its_instance
from .features.table import FEATURES
from .features.window import WINDOW


def within_declared(declared: Capabilities, case: Case) -> bool:
    """True if the case, and all cases that share its instance, keep within the declared lengths and windows."""
    if not all(asked.declared(declared, case) for asked in WINDOW.declared):
        return False
    others = declared_co_residents(declared, case, declared.graph | declared.eager) if case.multi_mode else []
    return all(
        asked.declared(declared, each) for asked in CONTEXT.declared for each in (case, *others, *on_its_instance(case))
    )


def not_declared(declared: Capabilities, case: Case) -> str:
    """The first value of ``case`` that is not declared, in words, in the order of an id's words; empty if all values
    are declared."""
    asked = (asked for feature in FEATURES for asked in feature.declared)
    found = next((each.words(case) for each in asked if not each.declared(declared, case)), "")
    return found or ("" if within_declared(declared, case) else "as many tokens of context")
