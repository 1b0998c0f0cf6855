"""Draft-decode: no request of any step is without a prefix."""

from __future__ import annotations

from dataclasses import replace

from ...contract import Capabilities
from ..fields import Changes, Fields
from ..plan import Plan
from .dimension import Asked, Dimension, OnSteps, Without, flag_word, of_flag

__all__ = ["PREFIXED"]


def _behind_prefixes(claims: Capabilities, case: Fields) -> Changes:
    if not case.draft or claims.server.drafts_without_prefix or case.prefixed:
        return {}
    return {"prefixes": tuple(max(1, prefix) for prefix in case.prefixes), "prefixed": True}


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    if not case.prefixed:
        return plans
    return [replace(plan, prefixes=tuple(max(1, prefix) for prefix in plan.prefixes)) for plan in plans]


PREFIXED = Dimension(
    name="prefixed",
    fields=("prefixed",),
    words=(flag_word("prefixed", "prefixed"),),
    describe=lambda case: {"prefixed": "no request of any step is without a prefix" if case.prefixed else ""},
    declared=(
        Asked(
            lambda case: "a draft without a prefix",
            lambda claims, case: claims.server.drafts_without_prefix or case.prefixed or not case.draft,
        ),
    ),
    fit=_behind_prefixes,
    values=Without("The nearest declared case has it, and no other."),
    covered=Without("A backend that declares the wider value takes every case of the narrower one."),
    simpler=of_flag("prefixed"),
    undeclared=Without("A constructor does not see the lengths of requests."),
    random=Without("The nearest declared case has it, and no other."),
    varies="instance",
    apply=(OnSteps(_plans),),
)
