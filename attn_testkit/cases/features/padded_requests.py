"""Padded requests of the graph, after the live ones of the case's own batch."""

from __future__ import annotations

from ...glossary import Entry
from ..fields import Fields
from .feature import Bound, Columns, Feature, Simpler, Without, Word, no_capability
from .numbers import MOST_REQUESTS, nearer_numbers
from .padding import PADDINGS

_SLACK = (0, 1, 3)
_MOST_SLACK = 4
"""Most padded requests of a random case."""


def _padded(case: Fields) -> int:
    return case.bucket - case.bs


def _phrase(case: Fields) -> str:
    padding = f", {_padded(case)} of them padding ({case.padding})" if _padded(case) else ""
    return f"{case.bucket} request{'s'[: case.bucket - 1]} in the graph{padding}"


PADDED_REQUESTS = Feature(
    name="padded requests",
    order=300,
    fields=("bucket",),
    words=(
        Word(
            r"b(\d+)(" + "|".join(PADDINGS) + ")",
            lambda match, so_far: {"bucket": int(match[1]), "padding": match[2]},
            lambda case: f"b{case.bucket}{case.padding}",
            always=True,
            bounds=(Bound("batch size of the graph", 1, MOST_REQUESTS),),
        ),
    ),
    explained=(
        Entry(
            "b4prod",
            "A graph of 4 requests, with padded requests filled as servers fill them.",
            also=("prod",),
            numbers=True,
        ),
        Entry("b4nan", "A graph of 4 requests, with NaN in the rows of padded requests.", also=("nan",), numbers=True),
        Entry(
            "b4stale",
            "A graph of 4 requests, in which padded requests keep what was in the buffers before.",
            also=("stale",),
            numbers=True,
        ),
        Entry(
            "b4small",
            "A graph of 4 requests, in which padded requests look like small live requests.",
            also=("small",),
            numbers=True,
        ),
    ),
    describe=lambda case: {"bucket": _phrase(case)},
    values=Columns(
        lambda declared, mode, tier: {"slack": list(_SLACK)},
        lambda declared, row, so_far: {"bucket": len(so_far["prefixes"]) + row["slack"]},
    ),
    simpler=Simpler(
        value=lambda case: str(_padded(case)),
        of=_padded,
        reset=lambda case, minimal: {"bucket": case.bs},
        size=lambda case, minimal: (_padded(case),),
        steps=lambda declared, case, minimal: (
            {"bucket": case.bs + padded} for padded in nearer_numbers(_padded(case), 0)
        ),
    ),
    random=lambda draws, declared, so_far: {"bucket": len(so_far["prefixes"]) + draws.number(0, _MOST_SLACK)},
    varies="step",
    apply=Without("cases/plans.py gives each step one of the two buckets."),
    **no_capability("No capability bounds the size of a graph."),
)
