"""Every pair of what is declared: kernels are compiled by heads, head dim, dtypes, pages and layout at once. In decode
with all layouts of the KV pool, in the other modes with those that the main array has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from ..cases.case import Case, Heads
from ..cases.dimensions.heads import typical_heads
from ..cases.dimensions.kv_layout import usual_layout
from ..cases.dimensions.numbers import some_of
from ..cases.head_layouts import alike, latent, latent_heads
from ..cases.layers import Layers
from ..cases.rows import Verify
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode
from .covering import covering_array
from .layer_options import with_options
from .pool_layouts import other_layouts

_T = TypeVar("_T")

_LENS = (530, 33, 1)
"""More than two pages of 256, and of one."""
_GROUPS, _MLA_HEADS, _LAYOUT_GROUPS = (2, 16), (16, 32, 128), (2, 4, 5, 8, 16)
"""Every usual one has its own cases (``declared_pairs.py``)."""
_MOST_DIM, _WINDOW = 256, 40
_FEW, _NARROW = 3, 7


def pair_array_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """A covering array of declared values two by two: MLA of 32 heads with an FP8 pool (vLLM #46952), large pages with
    a layout of the pool. Made of ``small``; long lists of values are cut to some.
    """
    if small.mode is not ForwardMode.DECODE:
        return
    one = small.with_changes(prefixes=_LENS, bucket=len(_LENS), data="gauss", layout="shuffled")
    dtypes, kv_dtypes = sorted(declared.dtypes), sorted(declared.kv_dtypes)
    pages, layouts = some_of(declared.page_sizes, _FEW), sorted(declared.kv_layouts)
    for heads, dims, rope in _families(declared, small, _GROUPS):
        # A latent pool has few layouts in practice, and each row of MLA costs as much as several others.
        few = layouts[:_FEW] if rope else layouts
        sizes = (len(heads), len(dims), len(dtypes), len(kv_dtypes), len(pages), len(few), 2)
        for of, dim, dtype, kv_dtype, page, layout, options in _pairs(sizes):
            yield (with_options(declared, one, _WINDOW) if options else one).with_changes(
                heads=heads[of],
                head_dim=dims[dim],
                rope_dim=rope,
                dtype=dtypes[dtype],
                kv_dtype=kv_dtypes[kv_dtype],
                page_size=pages[page],
                kv_layout=layouts[layout],
                layers=Layers() if options else Layers(1),
            )


def layout_array_cases(declared: Capabilities, minimal: Case) -> Iterator[Case]:
    """Array of a mode other than decode, for layouts that only few cases have, if there are any. Made of
    ``minimal``, three requests with its rows; pages that lie in no order.
    """
    layouts = other_layouts(declared)
    if minimal.mode is ForwardMode.DECODE:
        return
    layouts = layouts or [usual_layout(declared)]
    dtypes, kv_dtypes = sorted(declared.dtypes), sorted(declared.kv_dtypes, reverse=True)
    # In pages of one slot most layouts are alike.
    pages = some_of({page for page in declared.page_sizes if page > 2} or declared.page_sizes, _FEW)
    three = minimal.rows.counted((*minimal.new[:2], *minimal.new[:1]))
    one = minimal.of_requests((0,) * 3, padded=1, rows=three, layout="shuffled", data="gauss")
    chained = one.with_changes(rows=Verify(chain(one.width))) if one.tree and not declared.windows.in_trees else one
    alone = [each for each in typical_heads(declared) if alike(each, minimal.heads)]
    if not alone:
        return
    of_family = [
        of for of in _families(declared, minimal, _LAYOUT_GROUPS) if (of[2] > 0) == minimal.heads.layout.values_in_keys
    ]
    heads, dims, rope = next(iter(of_family), (alone, [minimal.head_dim], minimal.rope_dim))
    heads = heads[:_FEW]
    values: tuple[Sequence[object], ...] = (heads, dims, dtypes, kv_dtypes, pages)
    sizes = (len(layouts), *(min(len(each), 2) for each in values), 2, 2)
    rows = _pairs(sizes, f"layouts in {minimal.mode.value}")
    for number, (layout, of, dim, dtype, kv_dtype, page, options, short) in enumerate(rows):
        size = _first_or_other(pages, page, number)
        yield (with_options(declared, chained, _NARROW) if options else one).with_changes(
            kv_layout=layouts[layout],
            heads=_first_or_other(heads, of, number),
            head_dim=_first_or_other(dims, dim, number),
            rope_dim=rope,
            dtype=_first_or_other(dtypes, dtype, number),
            kv_dtype=_first_or_other(kv_dtypes, kv_dtype, number),
            page_size=size,
            # More than a page, and more than another.
            prefixes=(2 * size + 1, size + max(1, size // 2), 3) if short else (_LENS[0], 2 * size + 33, 0),
        )


def _first_or_other(values: Sequence[_T], other: int, number: int) -> _T:
    """The first value or, alternately, one of the others: each layout meets the first and another one, in two thirds of
    the cases that every pair of three values would take.
    """
    return values[1 + number % (len(values) - 1)] if other else values[0]


def _families(
    declared: Capabilities, small: Case, groups: Sequence[int]
) -> Iterator[tuple[list[Heads], list[int], int]]:
    """Layouts of heads, head dims and the rope's width: of MLA, and of all others."""
    found = [Heads("mha", 2, 2)] if "mha" in declared.families else []
    if "gqa" in declared.families:
        found += [Heads("gqa", 2 * group, 2) for group in groups if group in declared.gqa_ratios]
    dims = some_of([dim for dim in declared.head_dims if dim <= _MOST_DIM], _FEW)
    if found and dims:
        yield found, dims, 0
    if latent(declared):
        counts = [latent_heads(declared, count) for count in _MLA_HEADS if count in declared.gqa_ratios]
        if counts:
            yield counts, some_of(declared.head_dims, _FEW), small.rope_dim or min(declared.mla_rope_dims)


@lru_cache(maxsize=64)
def _pairs(sizes: tuple[int, ...], salt: str = "pairs") -> list[list[int]]:
    """Rows of indices into dimensions of these sizes, in which every two values of two dimensions meet.

    ``salt``: other rows for the same sizes.
    """
    return covering_array(sizes, 2, salt)
