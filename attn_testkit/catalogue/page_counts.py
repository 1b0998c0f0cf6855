"""Decode of 1 to 17 pages, each with a partly filled last page and some with a full one, for each group of heads and
dtype of the KV pool."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case, Heads
from ..cases.features.heads import typical_heads
from ..cases.features.numbers import nearest
from ..cases.layers import Layers
from ..contract import Capabilities, ForwardMode

_PAGE, _MOST_PAGES = 16, 17
_FULL = (1, 2, 4, 8, 16)
_MOST_WIDTH = 128
_WIDE = 16
"""A group of heads that fills a tile of rows."""


def page_count_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``; head dims and dtypes of the model alternate. Kernels are written for a group and a
    dtype, and branch on the number of pages: one gave NaN at 16 pages with a partly filled last page, only for groups
    of 16 and FP8 (ATOM #2211).
    """
    if small.mode is not ForwardMode.DECODE:
        return
    page = nearest(declared.kv_pool.page_sizes, _PAGE)
    tails = [count * page - page // 3 for count in range(1, _MOST_PAGES + 1)]
    # The last key is the new one.
    prefixes = tuple(keys - 1 for keys in (*tails, *(count * page for count in _FULL)))
    dims = sorted(dim for dim in declared.heads.head_dims if dim <= _MOST_WIDTH) or [small.head_dim]
    pairs = [
        (heads, kv_dtype)
        for heads in _layouts(declared, one_row=small.heads.layout.values_in_keys)
        for kv_dtype in sorted(declared.kv_pool.kv_dtypes)
    ]
    for turn, (heads, kv_dtype) in enumerate(pairs):
        yield small.of_requests(
            prefixes,
            heads=heads,
            head_dim=small.head_dim if small.heads.layout.values_in_keys else dims[turn % len(dims)],
            dtype=sorted(declared.precision.dtypes)[turn % len(declared.precision.dtypes)],
            kv_dtype=kv_dtype,
            page_size=page,
            layers=Layers(1),
            data="gauss",
        )


def groups_of_pages(declared: Capabilities) -> set[int]:
    """Query heads per KV head of the cases with several KV heads; none if these cases are longer than declared."""
    longest = (_MOST_PAGES + 1) * nearest(declared.kv_pool.page_sizes, _PAGE)
    layouts = _layouts(declared, one_row=False) if longest < declared.bounds.max_context_len else ()
    return {heads.q_heads // heads.kv_heads for heads in layouts if heads.family == "gqa"}


def _layouts(declared: Capabilities, *, one_row: bool) -> Iterator[Heads]:
    yield from (heads for heads in typical_heads(declared) if heads.layout.values_in_keys == one_row)
    if not one_row and "gqa" in declared.heads.families and _WIDE in declared.heads.gqa_ratios:
        yield Heads("gqa", 2 * _WIDE, 2)
