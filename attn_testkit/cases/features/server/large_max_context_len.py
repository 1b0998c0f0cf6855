"""A context that is far longer than every request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...plan import Plan
from .variant import ServerVariant

_TOKENS = 1 << 18
"""A number of tokens that needs more than 16 bits, also counted in pages; a third of it does, too."""
_KEPT = ("own batch", "own batch, elsewhere", "same lengths, other requests")
_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND, *ForwardMode)


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    """One case per backend: a row of its request table needs a megabyte."""
    if small.mode is next(mode for mode in _MODES if mode in declared.eager | declared.graph):
        yield small.of_requests((70,), data="gauss", variants=frozenset({"far"}))


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Only a few steps, because backends whose work grows with the context are slow."""
    *steps, oversized = plans
    return [*(replace(plan, eager_too=False) for plan in steps if plan.label in _KEPT), oversized]


LARGE_MAX_CONTEXT_LEN = ServerVariant(
    "far",
    f"max_context_len is {_TOKENS:,}, and no request is near it",
    "max_context_len",
    _cases,
    needs_no_capability=True,
    plans=_plans,
    context_len=_TOKENS,
    excludes={
        "empty_batches": "only few steps are run, and none of them without a request",
        "shapes": "only few steps are run",
    },
    order=70,
    also=("large max_context_len",),
)
