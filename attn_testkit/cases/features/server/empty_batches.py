"""Steps without a live request: a rank without requests still replays a graph, because the other ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities
from ...fields import C, Fields
from ...plan import Plan
from .variant import ServerVariant

_LENS = (9, 70, 1)


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    yield small.of_requests(_LENS, padded=1, layout="shuffled", data="gauss", variants=frozenset({"empty_batches"}))


def _fits(declared: Capabilities, case: Fields) -> bool:
    # Chunks follow each other, and nobody shares pages with nobody.
    return case.chunks == 1 and case.layout != "shared"


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Empty batches before and after the largest one, twice in a row, and in the other graph."""
    small = min(plan.bucket for plan in plans[:-1])
    first, longer, *others, oversized = plans
    idle = Plan("no live request", case.bucket, ())
    again, other = replace(idle, label="no live request again", eager_too=True), replace(idle, bucket=small)
    return [first, idle, longer, idle, again, *others, other, replace(first, label="own batch again"), oversized]


EMPTY_BATCHES = ServerVariant(
    "empty_batches",
    "some steps have no live request, as on an idle rank of data parallelism",
    "in eager mode only if server.takes_empty_batches is declared",
    _cases,
    _fits,
    plans=_plans,
    reaches_kernels=False,
    excludes={"KV splits": "without rows nothing is merged: servers return before they split keys"},
    order=10,
    also=("idle", "empty DP rank", "empty batch"),
)
