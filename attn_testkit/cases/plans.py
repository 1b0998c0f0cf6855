"""Requests and lengths of each step of a case, and the context that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .combined_steps import combined_plans
from .features.feature import OnSteps
from .features.server.table import variant_of
from .features.table import FEATURES
from .fields import Fields
from .plan import Plan

_MAX_OTHER_TOKENS = 512
"""Most prefix tokens of steps other than the case's own batch, so that one long request stays the only one."""
_MANY_REQUESTS = 64
_LEFT_OUT = {"longer, exact", "lengths in another order", "long and short"}
"""Steps that batches of more requests than that have not: each of them costs as much as a case of few requests."""


def make_plans(case: Fields, rng: np.random.Generator) -> tuple[tuple[int, ...], list[Plan]]:
    """Buckets, largest first, and the steps of a case-run; the last one is the eager step with more requests than any
    graph. ``rng`` is used in a fixed order: the same state gives the same lengths.
    """
    own, big, page = case.prefixes, case.bucket, case.page_size
    small = big // 2 if big > 1 else 2
    buckets = tuple(sorted({big, small}, reverse=True))

    def others(count: int, stretch: Callable[[int], int]) -> tuple[int, ...]:
        lens, left = [], _MAX_OTHER_TOKENS
        for i in range(count):
            length = stretch(own[i % len(own)])
            length = length if length <= left else int(rng.integers(0, min(left, 2 * page) + 1))
            left -= length
            lens.append(length)
        return tuple(lens)

    plans = [
        Plan("own batch", big, own),
        Plan("longer, exact", big, others(big, lambda k: k + page + 3), exact=True),
        Plan("one short request", big, others(1, lambda k: max(0, min(k, page) - 1))),
        Plan("other bucket", small, others(small, lambda k: k // 2 + 1)),
        Plan("own batch, elsewhere", big, own[::-1], eager_too=True),
        Plan(
            "long and short",
            big,
            others(max(1, big - 1), lambda k: int(rng.integers(0, k + 2 * page + 2))),
            eager_too=True,
        ),
        Plan("other bucket, padded", small, others(max(1, small - 1), lambda k: k + 1)),
    ]
    combined = combined_plans(case, buckets, plans)
    if case.padding == "small":
        plans = [_filled_up(plan, rng) for plan in plans]
        combined = [_filled_up(plan, rng) for plan in combined]
    elsewhere = plans[4].prefixes
    rotated = [Plan("same lengths, other requests", big, elsewhere, rotated=0)]
    if len(set(elsewhere)) > 1:
        rotated.append(Plan("lengths in another order", big, elsewhere[1:] + elsewhere[:1], rotated=1))
    oversized = Plan("more requests than any graph", big + 2, others(big + 2, lambda k: k // 3 + 2))
    plans = [*plans[:5], *rotated, *plans[5:], *combined, oversized]
    if big > _MANY_REQUESTS:
        plans = [plan for plan in plans if plan.label not in _LEFT_OUT]
    for feature in FEATURES:
        for meaning in feature.apply:
            plans = meaning.plans(case, plans) if isinstance(meaning, OnSteps) else plans
    return buckets, plans


def _filled_up(plan: Plan, rng: np.random.Generator) -> Plan:
    extra = tuple(int(rng.integers(0, 3)) for _ in range(plan.bucket - len(plan.prefixes)))
    return replace(plan, prefixes=plan.prefixes + extra)


def lens_of(case: Fields, plan: Plan) -> tuple[int, ...]:
    """Columns of the request table that each request of a step needs: its keys, including its own rows. This is an
    upper bound if rows are ragged and not yet drawn.
    """
    if case.draft:
        return tuple(case.draft.room(prefix, case.page_size) for prefix in plan.prefixes)
    return tuple(p + n for p, n in zip(plan.prefixes, plan.new or (case.width,) * len(plan.prefixes), strict=True))


def other_encoders(lens: Sequence[int]) -> tuple[int, ...]:
    """Return the same encoders with other requests; if there are several requests, one has no encoder, which only eager
    steps support."""
    turned = [*lens[1:], lens[0]]
    return (*turned[:-1], 0) if len(turned) > 1 else tuple(turned)


def context_len_of(case: Fields, plans: Sequence[Plan]) -> int:
    """``max_context_len``, in tokens, of a schedule that has these steps."""
    if variant_of(case).context_len:
        return variant_of(case).context_len
    if case.draft or case.new:
        longest = max(length for plan in plans for length in lens_of(case, plan))
    else:
        longest = max(max(plan.prefixes, default=0) for plan in plans) + case.width
    if own := plans[0].encoder_lens:
        # The second step has the first one's decoder lengths, with other requests' encoders.
        lens = zip(lens_of(case, plans[0]), own, other_encoders(own), strict=True)
        longest = max(longest, *(length - encoder + other for length, encoder, other in lens))
    if case.derived("context-room"):
        return longest
    # Wider than any request needs, and then never a width that a kernel could mistake for the longest request's.
    return -(-(longest + case.page_size + 1) // case.page_size) * case.page_size


def context_len(case: Fields) -> int:
    """``max_context_len`` of the case's schedule, in tokens, without laying it out."""
    return context_len_of(case, make_plans(case, np.random.default_rng(case.digest))[1])
