"""Rounds of target-verify: steps that continue from the states which steps before them left on the instance.

The same requests are verified again and again, in reverse order of the batch each time. A step names the one that runs
before it (``Step.follows``), so whoever runs a step, for a diagnosis too, runs its whole chain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..cases.case import Case

if TYPE_CHECKING:
    from .schedule import Step

__all__ = ["accepted_nodes", "with_rounds"]

_MOST = 3


def accepted_nodes(case: Case, index: int, count: int) -> tuple[int, ...]:
    """Accepted nodes of each of ``count`` drafts, for layers with states: all in one batch, as few as can be in
    another, and different ones elsewhere.

    0 means that a commit stores nothing. With slots, the root of a draft is always accepted.
    """
    least, most = (1 if case.state and case.state.rollback == "slots" else 0), case.width
    if index in (1, 2):
        return ((most, least)[index - 1],) * count
    first = int(np.random.default_rng([case.digest, index, 0xACCE]).integers(0, 1 << 16))
    return tuple(least + (first + place) % (most + 1 - least) for place in range(count))


def with_rounds(case: Case, step: Step, least: int = 0) -> Step:
    """The step after up to two rounds of the same requests. The first step of a case has none before it."""
    return _after(case, step, max(least, step.index % _MOST))


def _after(case: Case, step: Step, rounds: int) -> Step:
    if not rounds or not step.requests:
        return step
    counts = accepted_nodes(case, step.index + _MOST * rounds, step.bs)
    earlier = [
        replace(each, prefix=max(0, each.prefix - count), accepted=count)
        for each, count in zip(step.requests[::-1], counts, strict=True)
    ]
    requests = tuple(replace(each, slots=each.slots[: each.prefix + each.new]) for each in earlier)
    before = replace(
        step, name=f"{step.name}, a round before", label=f"{step.label}, a round before", requests=requests,
        seed=(step.seed + 0x9E3779B97F4A7C15) % 2**63, eager_too=False,
    )  # fmt: skip
    return replace(step, follows=_after(case, before, rounds - 1))
