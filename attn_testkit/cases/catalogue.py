"""Which cases a tier tries: a covering array over what a backend claims, and a few named cases beside it.

``smoke`` meets every value of every dimension once, ``core`` every pair of values, ``full`` every triple. Dimensions
hold only what is claimed, so that a claim is tried and nothing else is; and of long claims some values alone. From core
on the other values get a small case each (``small_cases.py``); what is left even so is named (``untried.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cachetools import LRUCache, cached

from ..contract import Capabilities, ForwardMode
from .as_claimed import as_claimed
from .case import Case
from .claimed import within_claims
from .claimed_pairs import claimed_pair_cases
from .code_cases import code_cases
from .covering import covering_array
from .dimensions.dimension import Without
from .dimensions.table import DIMENSIONS
from .enriched import enriched, varied
from .extremes import extreme_cases
from .kv_head_counts import one_head_cases, three_kv_heads_cases
from .large_cases import company_cases, large_cases, switch_cases
from .layer_cases import layer_cases
from .named import named_cases, named_from, smallest_of, without_options_of
from .options_together import options_together_cases
from .page_counts import page_count_cases
from .pair_array import layout_array_cases, pair_array_cases
from .parts import part_cases
from .pool_layouts import pool_layout_cases
from .row_edges import row_edge_cases
from .rows import minimal_rows
from .shared_prefixes import shared_prefix_cases
from .small_cases import plain_case, small_cases
from .uniform_batches import uniform_batch_cases
from .ways import big_pool_cases, way_cases

__all__ = ["TIERS", "generate", "within_claims"]

TIERS: Mapping[str, int] = {"smoke": 1, "core": 2, "full": 3}
"""Tier -> strength of the covering array."""

_COLUMNS = (
    "heads", "head_dim", "dtype", "kv_dtype", "page_size", "prefixes", "layout", "data", "window", "logit_cap", "sinks",
    "slack", "padding", "new_tokens", "draft", "tree", "width", "accepted", "chunks", "rope_dim",
)  # fmt: skip
"""Columns of the covering array in the order in which they were added: in another order it has other rows. New ones
come behind them, and need not stand here."""


def _columns(claims: Capabilities, mode: ForwardMode, tier: str) -> dict[str, Sequence[Any]]:
    found: dict[str, Sequence[Any]] = {}
    for dimension in DIMENSIONS:
        if not isinstance(dimension.values, Without):
            found.update(dimension.values.values(claims, mode, tier))
    known = [name for name in _COLUMNS if name in found]
    return {name: found[name] for name in (*known, *(name for name in found if name not in known))}


def _build(claims: Capabilities, mode: ForwardMode, row: Mapping[str, Any]) -> Case:
    values: dict[str, Any] = {"rows": minimal_rows(mode)}
    for dimension in DIMENSIONS:
        if not isinstance(dimension.values, Without):
            values |= {name: row[name] for name in dimension.fields if name in row}
            values |= dimension.values.fields(claims, row, values)
    return Case(**values)


@cached(LRUCache(64), condition=threading.Condition())
def generate(claims: Capabilities, mode: ForwardMode, tier: str, seed: int = 0) -> tuple[Case, ...]:
    """The cases of a tier for one mode of a backend with these claims, always in the same order.

    ``tier``: a name of ``TIERS``, else ``KeyError``. Empty where nothing that is claimed can be tried. ``seed``: other
    data, slots and choices for the same cases.
    """
    dimensions = _columns(claims, mode, tier)
    names = list(dimensions)
    if any(not values for values in (*dimensions.values(), claims.kv_layouts)):
        return ()
    strength = min(TIERS[tier], len(names))
    rows = _rows(tuple(len(dimensions[name]) for name in names), strength, mode.value)
    cases: dict[str, Case] = {}
    for row in rows:
        built = _build(claims, mode, {name: dimensions[name][i] for name, i in zip(names, row, strict=True)})
        # The seed decides lengths, too: seeded before it is asked whether it fits.
        case = as_claimed(claims, built.with_seed(seed))
        if within_claims(claims, case):
            cases.setdefault(case.id, case)
    if cases:
        for named in named_cases(claims, mode, tier, named_from(mode, list(cases.values()))):
            case = as_claimed(claims, named.with_seed(seed))
            if within_claims(claims, case):
                cases.setdefault(case.id, case)
    base = smallest_of(claims, without_options_of(claims, named_from(mode, list(cases.values())))) if cases else None
    if cases and tier != "smoke":
        found = list(cases.values())
        small = small_cases(claims, mode, tier, found, lambda case: within_claims(claims, as_claimed(claims, case)))
        cases.update((case.id, case) for case in (as_claimed(claims, each) for each in small))
    for each in _later(claims, mode, base, tier) if base else ():
        case = as_claimed(claims, each.with_seed(seed))
        if within_claims(claims, case):
            cases.setdefault(case.id, case)
    return tuple(cases.values())


def _later(claims: Capabilities, mode: ForwardMode, base: Case, tier: str) -> Iterator[Case]:
    """What stands behind all others: made of ``base``, which has little work for each row and key."""
    if tier != "smoke":
        yield from way_cases(claims, base)
        yield from varied(claims, list(part_cases(claims, base)))
        yield from extreme_cases(claims, base)
        yield from varied(claims, list(layer_cases(claims, base)))
        yield from one_head_cases(claims, base)
        yield from row_edge_cases(claims, tier, base)
        yield from three_kv_heads_cases(claims, base)
        yield from large_cases(claims, tier, base)
        yield from page_count_cases(claims, base)
        yield from company_cases(claims, base)
        yield from claimed_pair_cases(claims, base)
        yield from shared_prefix_cases(claims, base)
        arrays = list(enriched(claims, list(pair_array_cases(claims, base))))
        arrays += enriched(claims, list(layout_array_cases(claims, plain_case(claims, mode))))
        yield from arrays
        yield from varied(claims, list(options_together_cases(claims, base, arrays)), batches=True)
        yield from uniform_batch_cases(claims, base)
    yield from code_cases(claims, tier, base)
    yield from switch_cases(claims, base)
    yield from pool_layout_cases(claims, mode, tier, plain_case(claims, mode))
    if tier == "full":
        yield from big_pool_cases(claims, base)


@cached(LRUCache(256), condition=threading.Condition())
def _rows(sizes: tuple[int, ...], strength: int, salt: str) -> list[list[int]]:
    """A covering array over dimensions of so many values, as indices. Many backends differ in nothing else."""
    return covering_array(sizes, strength, salt) if strength > 1 else _once(sizes)


def _once(sizes: Sequence[int]) -> list[list[int]]:
    """Every value once: as many rows as the longest dimension has values."""
    return [[(row + shift) % size for shift, size in enumerate(sizes)] for row in range(max(sizes))]
