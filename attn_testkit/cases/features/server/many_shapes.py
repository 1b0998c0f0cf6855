"""More batches of different shapes on one instance than a cache of plans or kernels has room for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...plan import Plan
from .variant import ServerVariant

_SHAPES = 134
"""More than 128, the largest bound known of such a cache (ROCm/aiter #4587)."""
_LENS = (9, 21)
_NEEDED = ("same lengths, other requests",)
"""The step that is replaced by others."""


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    """Cases of decode, if it has graphs: a graph exists longer than an entry of a cache."""
    if small.mode is ForwardMode.DECODE and small.mode in declared.graph:
        yield small.with_changes(prefixes=_LENS, data="gauss", bucket=len(_LENS), variants=frozenset({"shapes"}))


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """The captured batch size, then a request of each length in the other graph and in eager, then the first again."""
    first, *others, oversized = plans
    small = min(plan.bucket for plan in plans[:-1])
    kept = [plan for plan in others if plan.label in _NEEDED]
    shapes = [Plan(f"one request of {n + 1} keys", small, (n,), eager_too=True) for n in range(_SHAPES)]
    return [first, *kept, *shapes, replace(first, label="own batch after many others", eager_too=True), oversized]


MANY_BATCH_SHAPES = ServerVariant(
    "shapes",
    f"{_SHAPES} batches of different lengths come between two replays of a graph",
    "decode under graphs",
    _cases,
    needs_no_capability=True,
    plans=_plans,
    excludes={"empty_batches": "its steps replace the steps without a request"},
    order=90,
    also=("many shapes",),
)
