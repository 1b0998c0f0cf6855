"""Cases that a tier tries: a covering array over what a backend declares, and a few named cases in addition.

``smoke`` meets every value of every dimension once, ``core`` every pair of values, ``full`` every triple. An instance
has several values of some dimensions, in its layers and its replays (``Columns.inside``): core pairs them there.
Dimensions hold only declared values, and of long capabilities only some of them. From core on the other values get a
small case each (``cases_for_uncovered.py``); values that no case covers are named (``not_covered.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from cachetools import LRUCache, cached

from ..cases.case import Case
from ..cases.declared import within_declared as within_declared
from ..cases.dimensions.dimension import Without
from ..cases.dimensions.table import DIMENSIONS
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import minimal_rows
from ..cases.server_variants import big_index_pool_cases, big_pool_cases, variant_cases, wide_scores_cases
from ..contract import Capabilities, ForwardMode
from .alibi import alibi_cases
from .cases_for_uncovered import cases_for_uncovered, two_request_case
from .code_cases import code_cases
from .covering import covering_array
from .cross_attention import cross_attention_cases
from .declared_pairs import declared_pair_cases
from .extremes import extreme_cases
from .indexer_cases import indexer_cases
from .kv_head_counts import one_head_cases, three_kv_heads_cases
from .kv_splits import split_cases
from .large_cases import batch_mates_cases, large_cases, switch_cases
from .layer_cases import layer_cases
from .local_chunks import local_chunk_cases
from .many_requests import many_request_cases
from .named import named_cases, named_from, smallest_of, verify_loop_cases, without_options_of
from .options_together import options_together_cases
from .page_counts import page_count_cases
from .pair_array import layout_array_cases, pair_array_cases
from .pool_layouts import pool_layout_cases
from .qq_bias import qq_bias_cases
from .randomly_combined import randomly_combined, randomly_varied
from .requests_without_rows import requests_without_rows_cases
from .row_edges import row_edge_cases
from .seldom_cases import seldom_cases
from .shared_prefixes import shared_prefix_cases
from .spans import span_cases
from .state_cases import state_cases, two_requests_with_states
from .uniform_batches import uniform_batch_cases

TIERS: Mapping[str, int] = {"smoke": 1, "core": 2, "full": 3}
"""Tier -> strength of the covering array."""


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> dict[str, Sequence[Any]]:
    """Columns of the covering array, in the order in which they were added."""
    found: dict[str, Sequence[Any]] = {}
    order: dict[str, int] = {}
    for dimension in DIMENSIONS:
        if not isinstance(dimension.values, Without):
            found.update(dimension.values.values(declared, mode, tier))
            order |= dimension.values.order
    return {name: found[name] for name in sorted(found, key=lambda name: (name not in order, order.get(name)))}


def _build(declared: Capabilities, mode: ForwardMode, row: Mapping[str, Any]) -> Case:
    values: dict[str, Any] = {"rows": minimal_rows(mode)}
    for dimension in DIMENSIONS:
        if not isinstance(dimension.values, Without):
            values |= {name: row[name] for name in dimension.fields if name in row}
            values |= dimension.values.fields(declared, row, values)
    return Case(**values)


@cached(LRUCache(64), condition=threading.Condition())
def generate(declared: Capabilities, mode: ForwardMode, tier: str, seed: int = 0) -> tuple[Case, ...]:
    """The cases of a tier for one mode of a backend with these capabilities, always in the same order.

    ``tier``: a name of ``TIERS``, else ``KeyError``. Empty where nothing that is declared can be tried. ``seed``: other
    data, slots and choices for the same cases.
    """
    if declared.state is not None:
        # Their lengths, data and conventions are others: chunks instead of pages, decays instead of logits.
        made = (nearest_declared(declared, each.with_seed(seed)) for each in state_cases(declared, mode, tier))
        states = {each.id: each for each in made if within_declared(declared, each)}
        if states and tier != "smoke":
            small_base = two_requests_with_states(declared, next(iter(states.values())))
            found = list(states.values())
            small = cases_for_uncovered(declared, mode, tier, found, partial(within_declared, declared), small_base)
            states.update((each.id, each) for each in small)
        return tuple(states.values())
    dimensions = _columns(declared, mode, tier)
    names = list(dimensions)
    if any(not values for values in (*dimensions.values(), declared.kv_layouts)):
        return ()
    strength = min(TIERS[tier], len(names))
    unpaired = _unpaired(tuple(names)) if tier == "core" else frozenset[tuple[int, int]]()
    # With other rows two derived parameters have values that never meet.
    salt = f"{mode.value} 1" if tier == "core" else mode.value
    rows = _rows(tuple(len(dimensions[name]) for name in names), strength, salt, unpaired)
    cases: dict[str, Case] = {}
    for row in rows:
        built = _build(declared, mode, {name: dimensions[name][i] for name, i in zip(names, row, strict=True)})
        # The seed decides lengths, too: seeded before it is asked whether it fits.
        case = nearest_declared(declared, built.with_seed(seed))
        if within_declared(declared, case):
            cases.setdefault(case.id, case)
    bases = _first_of_all_pairs(declared, mode, dimensions, seed) if tier == "core" else []
    bases = bases or list(cases.values())
    if cases:
        for named in named_cases(declared, mode, tier, named_from(mode, bases)):
            case = nearest_declared(declared, named.with_seed(seed))
            if within_declared(declared, case):
                cases.setdefault(case.id, case)
    base = smallest_of(declared, without_options_of(declared, named_from(mode, bases))) if cases else None
    if cases and tier != "smoke":
        found = list(cases.values())
        small = cases_for_uncovered(
            declared, mode, tier, found, lambda case: within_declared(declared, nearest_declared(declared, case))
        )
        cases.update((case.id, case) for case in (nearest_declared(declared, each) for each in small))
    for each in _later(declared, mode, base, tier) if base else ():
        case = nearest_declared(declared, each.with_seed(seed))
        if within_declared(declared, case):
            cases.setdefault(case.id, case)
    return tuple(cases.values())


_BASES = 8
"""Rows out of which the base of the named cases is taken."""


def _first_of_all_pairs(
    declared: Capabilities, mode: ForwardMode, columns: Mapping[str, Sequence[Any]], seed: int
) -> list[Case]:
    """The first cases of an array that pairs all columns, which made cases of core were made of before instances had
    several values: their ids stay what they are.
    """
    names = [name for name in columns if name != "layers"]
    found = []
    for row in covering_array(tuple(len(columns[name]) for name in names), TIERS["core"], mode.value, most=_BASES):
        built = _build(declared, mode, {name: columns[name][i] for name, i in zip(names, row, strict=True)})
        case = nearest_declared(declared, built.with_seed(seed))
        if within_declared(declared, case):
            found.append(case)
    return found


def _later(declared: Capabilities, mode: ForwardMode, base: Case, tier: str) -> Iterator[Case]:
    """Cases that come after all others: made of ``base``, which has little work for each row and key."""
    if tier != "smoke":
        yield from variant_cases(declared, base)
        yield from randomly_varied(declared, list(split_cases(declared, base)))
        yield from extreme_cases(declared, base)
        yield from randomly_varied(declared, list(layer_cases(declared, base)))
        yield from one_head_cases(declared, base)
        yield from row_edge_cases(declared, tier, base)
        yield from three_kv_heads_cases(declared, base)
        yield from large_cases(declared, tier, base)
        yield from page_count_cases(declared, base)
        yield from batch_mates_cases(declared, base)
        yield from declared_pair_cases(declared, base)
        yield from shared_prefix_cases(declared, base)
        yield from verify_loop_cases(declared, base)
        arrays = list(randomly_combined(declared, list(pair_array_cases(declared, base))))
        arrays += randomly_combined(declared, list(layout_array_cases(declared, two_request_case(declared, mode))))
        yield from arrays
        yield from randomly_varied(declared, list(options_together_cases(declared, base, arrays)), batches=True)
        yield from uniform_batch_cases(declared, base)
        yield from many_request_cases(declared, base)
        yield from local_chunk_cases(declared, base)
        yield from alibi_cases(declared, base)
        yield from span_cases(declared, base)
        yield from qq_bias_cases(declared, base)
        yield from requests_without_rows_cases(declared, base)
        yield from cross_attention_cases(declared, base)
    yield from code_cases(declared, tier, base)
    yield from switch_cases(declared, base)
    yield from pool_layout_cases(declared, mode, tier, two_request_case(declared, mode))
    if tier != "smoke":
        yield from seldom_cases(declared, base)
        yield from big_index_pool_cases(declared, base, tier)
        yield from indexer_cases(declared, base)
        yield from wide_scores_cases(declared, base, tier)
    if tier == "full":
        yield from big_pool_cases(declared, base)


@cached(LRUCache(256), condition=threading.Condition())
def _rows(sizes: tuple[int, ...], strength: int, salt: str, unpaired: frozenset[tuple[int, int]]) -> list[list[int]]:
    """A covering array over dimensions of so many values, as indices. Many backends differ in nothing else."""
    return covering_array(sizes, strength, salt, unpaired) if strength > 1 else _once(sizes)


def _unpaired(names: tuple[str, ...]) -> frozenset[tuple[int, int]]:
    """Columns whose values need not meet, by their numbers: an instance has several values of one of them."""
    inside: dict[str, Sequence[str]] = {}
    for dimension in DIMENSIONS:
        if not isinstance(dimension.values, Without):
            inside |= dimension.values.inside
    return frozenset(
        (at, later)
        for (at, one), (later, other) in combinations(enumerate(names), 2)
        if (one in inside or other in inside) and other not in inside.get(one, ()) and one not in inside.get(other, ())
    )


def _once(sizes: Sequence[int]) -> list[list[int]]:
    """Every value once: as many rows as the longest dimension has values."""
    return [[(row + shift) % size for shift, size in enumerate(sizes)] for row in range(max(sizes))]
