"""Steps in which everything that varies from step to step is combined: the second level of the catalogue.

Other steps are made of the case's own batch, each for a purpose (``plans.py``). A replay costs a thirtieth of an
instance with its captures, so an instance runs a few more replays, with other lengths, requests, slots, padding and
data. Each replay has a value that no other has. The first values of a case follow from its id, so all cases of a tier
together have the triples of values that one instance cannot have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .features.data_pattern import DATA, REVEALING
from .features.lengths import PATTERNS
from .features.padding import PADDINGS
from .features.slot_order import LAYOUTS
from .fields import Fields
from .plan import Plan

_FEW, _MANY = 1, 3
"""Number of steps whose values are combined. It is larger if each layer has its own options, because such an instance
costs more to set up.
"""
_MOST_TOKENS = 512
_MOST_REQUESTS = 9
"""Requests of such a step, however many the bucket has."""
_COUNTS = ("pattern", "exact", "all but one", "one")
_COLUMNS: dict[str, Sequence[Any]] = {
    "batch": tuple(PATTERNS),
    "count": _COUNTS,
    "bucket": (0, 1),
    # Pages that are shared, and rows that small requests fill, are decisions about all steps of a case.
    "layout": tuple(layout for layout in LAYOUTS if layout != "shared"),
    "padding": tuple(padding for padding in PADDINGS if padding != "small"),
}


def combined_plans(case: Fields, buckets: Sequence[int], plans: Sequence[Plan]) -> list[Plan]:
    """Further steps of a case that has ``plans``: no request is longer than the longest of theirs, and no step has more
    keys than their largest. There are none for a loop, or for layers that keep a state.
    """
    if case.rounds or case.state is not None:
        return []
    rng = np.random.default_rng(case.digest ^ 0xA11)
    columns = {**_COLUMNS, "data": tuple(dict.fromkeys((*REVEALING, case.data)))}
    if (case.instance_of or case).multi_mode:
        # The last step is repeated with other modes between: their plans show only in those of several requests.
        columns |= {"count": _COUNTS[:-1], "bucket": (0,)}
    orders = {name: rng.permutation(len(values)) for name, values in columns.items()}
    made = []
    for number in range(_MANY if case.layers.varied else _FEW):
        drawn = {name: values[orders[name][number % len(values)]] for name, values in columns.items()}
        bucket = buckets[drawn["bucket"] % len(buckets)]
        of_pattern = PATTERNS[drawn["batch"]](max(case.page_size, 8), case.width)
        made.append(
            Plan(
                f"combined values {number + 1}",
                bucket,
                _bounded(of_pattern, _count(drawn["count"], len(of_pattern), bucket), plans),
                layout=drawn["layout"] if case.layout in _COLUMNS["layout"] else "",
                padding=drawn["padding"] if case.padding in _COLUMNS["padding"] else "",
                data=drawn["data"] if case.data in DATA else "",
            )
        )
    return made


def _count(word: str, of_pattern: int, bucket: int) -> int:
    counts = {"pattern": of_pattern, "exact": bucket, "all but one": bucket - 1, "one": 1}
    return max(1, min(counts[word], bucket, _MOST_REQUESTS))


def _bounded(lens: Sequence[int], count: int, plans: Sequence[Plan]) -> tuple[int, ...]:
    longest = max(length for plan in plans for length in plan.prefixes)
    found, left = list[int](), min(_MOST_TOKENS, max(sum(plan.prefixes) for plan in plans))
    for number in range(count):
        found.append(max(0, min(lens[number % len(lens)], longest, left)))
        left -= found[-1]
    return tuple(found)
