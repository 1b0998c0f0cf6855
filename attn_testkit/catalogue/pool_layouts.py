"""Another declared layout of the KV pool in each mode of smoke; from core on the array has all of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.kv_layout import usual_layout
from ..contract import KV_LAYOUTS, Capabilities, ForwardMode


def pool_layout_cases(declared: Capabilities, mode: ForwardMode, small: Case) -> Iterator[Case]:
    """One case at most. ``small``: two requests, of as many KV heads as a case has."""
    others = [name for name in KV_LAYOUTS if name in declared.kv_layouts and name != usual_layout(declared)]
    turn = list(ForwardMode).index(mode)
    pages = sorted(declared.page_sizes)
    # In pages of one slot most layouts are alike.
    page = next((page for page in pages if page > 2), pages[-1])
    for name in others[turn % max(1, len(others)) :][:1]:
        # More than a page, and more than another; pages that lie in no order.
        prefixes = (2 * page + 1, page + max(1, page // 2), 3)
        rows = small.rows.counted((*small.new[:2], *small.new[:1]))
        of_pool = small.with_changes(
            kv_layout=name, kv_dtype=max(declared.kv_dtypes), page_size=page, layout="shuffled", data="gauss"
        )
        yield of_pool.of_requests(prefixes, padded=1, rows=rows)
