"""Each declared layout of the KV pool that the array has only in cases of one KV head, or of requests within a page; in
smoke at most one of them for each mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..cases.case import Case
from ..cases.features.kv_layout import usual_layout
from ..contract import KV_LAYOUTS, Capabilities, ForwardMode


def pool_layout_cases(
    declared: Capabilities, mode: ForwardMode, tier: str, small: Case, found: Collection[Case]
) -> Iterator[Case]:
    """``small``: two requests, of as many KV heads as a case has. ``found``: cases of the array."""
    others = [name for name in KV_LAYOUTS if name in declared.kv_pool.kv_layouts and name != usual_layout(declared)]
    wanted = [name for name in others if not _shows(name, found)]
    if tier == "smoke" and wanted:
        wanted = [wanted[list(ForwardMode).index(mode) % len(wanted)]]
    pages = sorted(declared.kv_pool.page_sizes)
    # In pages of one slot most layouts are alike.
    page = next((page for page in pages if page > 2), pages[-1])
    for name in wanted:
        # More than a page, and more than another; pages in no order.
        prefixes = (2 * page + 1, page + max(1, page // 2), 3)
        rows = small.rows.counted((*small.new[:2], *small.new[:1]))
        of_pool = small.with_changes(
            kv_layout=name, kv_dtype=max(declared.kv_pool.kv_dtypes), page_size=page, layout="shuffled", data="gauss"
        )
        yield of_pool.of_requests(prefixes, padded=1, rows=rows)


def _shows(name: str, cases: Collection[Case]) -> bool:
    """True if a case has a pool in which strides of pages and of heads both matter."""
    return any(
        case.kv_layout == name and case.heads.kv_heads > 1 and max(case.prefixes) > case.page_size > 1 for case in cases
    )
