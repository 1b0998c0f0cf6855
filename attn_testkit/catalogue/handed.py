"""Cases of memory that another instance hands over: each kind of ranks with each page size, and prompts that end before
a page of the sender, at its end and after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..cases.case import Case
from ..cases.features.handed import SHARED, handed_from, handed_of, kinds_and_pools
from ..contract import Capabilities, ForwardMode
from ..contract.state_kind import STATE_KINDS
from .layer_options import without_options

_SMALLEST = 4
"""Pages of fewer slots are not paired with prompts that end at their end."""


def handed_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, with as little work for each row and key as the declaration allows.

    A prompt that ends inside a page of the sender leaves slots there, which are another page here (vLLM #26759). Two of
    three prompts are also longer than a page here.
    """
    kinds, pages, layouts = kinds_and_pools(declared)
    plain = without_options(declared, small)
    for number, (kind, page) in enumerate(product(kinds, pages)):
        sender = max(page, _SMALLEST)
        larger = max(sender, small.page_size)
        lens = (2 * larger + 3, sender, larger + sender - 1, 1)
        case = plain.of_requests(lens, padded=1, data="gauss", layout="shuffled")
        try:
            handed = handed_from(case, kind, page, layouts[number % len(layouts)])
        except ValueError:
            continue
        yield case.with_changes(handed=handed)


def state_handed_cases(declared: Capabilities, plain: Case, number: int) -> Iterator[Case]:
    """Cases of ranks that share key heads, derived from ``plain``, of layers that keep a state: groups of Mamba2, and
    KV heads of a hybrid model. Ranks here share one, or ranks of the sender do.

    ``number`` of the kind: if its groups are not shared, only the first kind of a hybrid model has cases. The array has
    no such ranks, because they exclude most numbers of heads. Decode has each page size, and other modes one.
    """
    kinds, pages, layouts = kinds_and_pools(declared)
    state, heads = declared.state, plain.heads
    replicates = STATE_KINDS[heads.family].replicates_groups
    if SHARED not in kinds or state is None or plain.state is None:
        return
    if not replicates and (number or not state.hybrid):
        return
    ratio = heads.q_heads // heads.kv_heads
    tried = [*product((1, 2), pages[-2:])]
    for index, (keys, page) in enumerate(tried if plain.mode is ForwardMode.DECODE else tried[:1]):
        shape = replace(plain.state, strided=state.strided and index % 2 == 1)
        case = plain.with_changes(heads=replace(heads, q_heads=keys * ratio, kv_heads=keys), state=shape)
        try:
            case = case.with_changes(handed=handed_from(case, SHARED, page, layouts[index % len(layouts)]))
        except ValueError:
            continue
        shared = handed_of(case)
        assert shared is not None
        # The first rank of the second head, which a rank that counts heads in another way does not get.
        every = (_of_lengths(case, last) for last in range(30, 90))
        yield next(each for each in every if each.derived("receiving-rank", shared.ranks) == shared.ranks // 2)


def _of_lengths(case: Case, last: int) -> Case:
    """The case with other lengths. Prompts keep their rows."""
    if case.mode is ForwardMode.EXTEND:
        return case.with_changes(prefixes=(*case.prefixes[:-1], last))
    return case.of_requests((5, 1, last), padded=1)
