"""Cases that a tier tries: a covering array over what a backend declares, and a few named cases in addition.

``smoke`` meets every value of every feature, and everything that is declared, once, ``core`` every pair of values,
``full`` every triple. An instance has several values of some features, in its layers and its replays
(``Columns.inside``): core pairs them there. Columns contain only declared values, and for capabilities with many values
only some of them. From core on, each of the other values gets a small case (``cases_for_uncovered.py``); values that no
case covers are named (``not_covered.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial

from cachetools import LRUCache, cached

from ..cases.case import Case
from ..cases.declared import within_declared as within_declared
from ..cases.features.encoder_only import decodes
from ..cases.features.server.big_pool import big_index_pool_cases, big_pool_cases
from ..cases.features.server.table import usual_page, variant_cases
from ..cases.features.server.wide_scores import wide_scores_cases
from ..cases.nearest_declared import nearest_declared
from ..contract import Capabilities, ForwardMode
from .array import TIERS as TIERS
from .array import array_cases, array_of
from .cases_for_uncovered import cases_for_uncovered, two_request_case
from .code_cases import code_cases
from .declared_pairs import declared_pair_cases
from .encoder_cases import encoder_cases
from .extremes import extreme_cases, halfway_cases
from .feature_cases import feature_cases
from .full_contexts import full_context_cases
from .handed import handed_cases
from .indexer_cases import indexer_cases
from .kv_head_counts import one_head_cases, three_kv_heads_cases
from .kv_splits import split_cases
from .large_cases import batch_mates_cases, far_cases, large_cases, switch_cases
from .layer_cases import layer_cases, shaped_cases
from .many_requests import many_request_cases
from .named import named_cases, named_from, smallest_of, verify_loop_cases, without_options_of
from .never_together import meeting_cases
from .page_counts import page_count_cases
from .pool_layouts import pool_layout_cases
from .row_edges import row_edge_cases
from .row_ranks import row_rank_cases
from .seldom_cases import seldom_cases
from .shared_prefixes import shared_prefix_cases
from .state_cases import state_cases, two_requests_with_states
from .uniform_batches import uniform_batch_cases


@cached(LRUCache(64), condition=threading.Condition())
def generate(declared: Capabilities, mode: ForwardMode, tier: str, seed: int = 0) -> tuple[Case, ...]:
    """The cases of a tier for one mode of a backend with these capabilities, always in the same order.

    Raises ``KeyError`` if ``tier`` is not in ``TIERS``. The result is empty if no declared value can be tried.
    ``seed``: other data, slots and choices for the same cases.
    """
    if array_of(declared, mode, tier).is_empty:
        return ()
    if declared.state is not None:
        states = {each.id: each for each in array_cases(declared, mode, tier, seed)}
        made = (nearest_declared(declared, each.with_seed(seed)) for each in state_cases(declared, mode, tier))
        states |= {each.id: each for each in made if within_declared(declared, each)}
        if states and tier != "smoke":
            small_base = two_requests_with_states(declared, next(iter(states.values())))
            found = list(states.values())
            small = cases_for_uncovered(declared, mode, tier, found, partial(within_declared, declared), small_base)
            states.update((each.id, each) for each in small)
            met = meeting_cases(declared, mode, list(states.values()))
            states.update((each.id, each) for each in met if within_declared(declared, each))
        return tuple(states.values())
    if not declared.kv_pool.kv_layouts:
        return ()
    cases: dict[str, Case] = {}
    for of_tier in dict.fromkeys((tier, "core" if tier == "full" else tier)):
        cases.update((case.id, case) for case in array_cases(declared, mode, of_tier, seed))
    bases = [decodes(case) for case in cases.values()]
    first = named_from(bases) if cases else None
    if first and tier == "smoke":
        first = first.with_changes(page_size=usual_page(declared), layout="shuffled", data="gauss")
    if first:
        for named in named_cases(declared, mode, tier, first):
            case = nearest_declared(declared, named.with_seed(seed))
            if within_declared(declared, case):
                cases.setdefault(case.id, case)
    base = smallest_of(declared, without_options_of(declared, first)) if first else None
    if cases and tier != "smoke":
        found = list(cases.values())
        small = cases_for_uncovered(
            declared, mode, tier, found, lambda case: within_declared(declared, nearest_declared(declared, case))
        )
        cases.update((case.id, case) for case in (nearest_declared(declared, each) for each in small))
    for each in _later(declared, mode, base, tier, bases) if base else ():
        case = nearest_declared(declared, each.with_seed(seed))
        if within_declared(declared, case):
            cases.setdefault(case.id, case)
    if tier == "smoke" and base:
        for each in feature_cases(declared, mode, base, list(cases.values())):
            case = nearest_declared(declared, each.with_seed(seed))
            if within_declared(declared, case):
                cases.setdefault(case.id, case)
    if tier != "smoke":
        for each in meeting_cases(declared, mode, list(cases.values())):
            if within_declared(declared, each):
                cases.setdefault(each.id, each)
    return tuple(cases.values())


def _later(declared: Capabilities, mode: ForwardMode, base: Case, tier: str, found: Sequence[Case]) -> Iterator[Case]:
    """Cases that come after all others, derived from ``base``, which has little work for each row and key. ``found``:
    cases of the array."""
    if tier != "smoke":
        yield from variant_cases(declared, base)
        yield from split_cases(declared, base)
        yield from extreme_cases(declared, base)
        yield from halfway_cases(declared, base, found)
        yield from layer_cases(declared, base)
        yield from shaped_cases(declared, found)
        yield from one_head_cases(declared, base)
        yield from row_edge_cases(declared, tier, base)
        yield from three_kv_heads_cases(declared, base)
        yield from large_cases(declared, tier, base)
        yield from far_cases(declared, base, found)
        yield from page_count_cases(declared, base)
        yield from batch_mates_cases(declared, base)
        yield from declared_pair_cases(declared, base)
        yield from shared_prefix_cases(declared, base)
        yield from verify_loop_cases(declared, base)
        yield from full_context_cases(declared, base)
        yield from uniform_batch_cases(declared, base)
        yield from many_request_cases(declared, base)
        yield from handed_cases(declared, base)
        yield from encoder_cases(declared, base)
    yield from row_rank_cases(declared, base, tier)
    yield from code_cases(declared, tier, base)
    yield from switch_cases(declared, base)
    yield from pool_layout_cases(declared, mode, tier, two_request_case(declared, mode), found)
    if tier != "smoke":
        yield from seldom_cases(declared, base)
        yield from big_index_pool_cases(declared, base, tier)
        yield from indexer_cases(declared, base)
        yield from wide_scores_cases(declared, base, tier)
    if tier == "full":
        yield from big_pool_cases(declared, base)
