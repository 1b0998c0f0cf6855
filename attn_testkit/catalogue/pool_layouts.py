"""Cases for the declared layouts of the KV pool, in addition to those of the usual layout."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.kv_layout import usual_layout
from ..contract import KV_LAYOUTS, Capabilities, ForwardMode


def other_layouts(declared: Capabilities) -> list[str]:
    """The declared layouts that only few cases have."""
    return [name for name in KV_LAYOUTS if name in declared.kv_layouts and name != usual_layout(declared)]


def pool_layout_cases(declared: Capabilities, mode: ForwardMode, tier: str, small: Case) -> Iterator[Case]:
    """One for each other layout and, from core on, KV dtype; in full each page size. In smoke one in all, in each mode
    another. In core of other modes than decode an array has them, with all else that is declared (``pair_array.py``).

    ``small``: two requests, of as many KV heads as a case has.
    """
    others = other_layouts(declared)
    if tier == "core" and mode is not ForwardMode.DECODE:
        return
    pages = sorted(declared.page_sizes)
    # In pages of one slot most layouts are alike.
    page = next((page for page in pages if page > 2), pages[-1])
    dtypes = sorted(declared.kv_dtypes, reverse=True)
    if tier == "smoke":
        turn = list(ForwardMode).index(mode)
        others, dtypes = others[turn % max(1, len(others)) :][:1], dtypes[:1]
    for name in others:
        for dtype in dtypes:
            for size in pages if tier == "full" else [page]:
                # More than a page, and more than another; pages that lie in no order.
                prefixes = (2 * size + 1, size + max(1, size // 2), 3)
                of_pool = small.with_changes(kv_layout=name, kv_dtype=dtype, page_size=size, layout="shuffled")
                yield of_pool.of_requests(
                    prefixes, padded=1, rows=small.rows.counted((*small.new[:2], *small.new[:1])), data="gauss"
                )
