"""Draft-decode: every request of every step has a prefix."""

from __future__ import annotations

from dataclasses import replace

from ...contract import Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from ..plan import Plan
from ..rows import changed_rows
from .feature import Asked, Feature, OnSteps, Without, Word, of_rows_part


def _behind_prefixes(declared: Capabilities, case: Fields) -> Changes:
    if not case.draft or declared.server.drafts_without_prefix or case.with_prefix:
        return {}
    prefixes = tuple(max(1, prefix) for prefix in case.prefixes)
    return {"prefixes": prefixes, **changed_rows(case.rows, with_prefix=True)}


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    if not case.with_prefix:
        return plans
    return [replace(plan, prefixes=tuple(max(1, prefix) for prefix in plan.prefixes)) for plan in plans]


def _wrong(case: Fields) -> str:
    return (
        f"prefixed, with keys {case.prefixes}: each request needs at least one key"
        if case.with_prefix and 0 in case.prefixes
        else ""
    )


PREFIXED = Feature(
    name="prefixed",
    order=90,
    fields=Without("`rows` of a draft-decode has it."),
    wrong=_wrong,
    words=(
        Word(
            "prefixed",
            lambda match, so_far: changed_rows(so_far["rows"], with_prefix=True),
            lambda case: "prefixed" * case.with_prefix,
            spelled=("prefixed",),
        ),
    ),
    explained=(
        Entry(
            "prefixed",
            "draft-decode: every request of every step has a prefix, for a backend that does not declare "
            "drafts without one.",
        ),
    ),
    describe=lambda case: {"prefixed": "no request of any step is without a prefix" if case.with_prefix else ""},
    declared=(
        Asked(
            lambda case: "a draft without a prefix",
            lambda declared, case: declared.server.drafts_without_prefix or case.with_prefix or not case.draft,
        ),
    ),
    fit=_behind_prefixes,
    values=Without("Only the nearest declared case has this value."),
    covered=Without("A backend that declares the wider value supports every case of the narrower one."),
    simpler=of_rows_part("with_prefix", value=lambda case: "yes" if case.with_prefix else "no"),
    undeclared=Without("A constructor does not see the lengths of requests."),
    random=Without("Only the nearest declared case has this value."),
    varies="instance",
    apply=(OnSteps(_plans),),
)
