"""Rows of one request on both sides of a boundary: of splits of the keys, or of tiles of rows x heads.

A kernel that asks a request's first row, or its last, how many splits there are is correct as long as all rows have the
same number. A kernel that packs the heads of a KV head into tiles of rows is correct until a tile begins inside a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cases.case import CODES, Case, Heads
from ..cases.features.rows import most_rows
from ..cases.rows import Accepted, Extend, Verify, room_for
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode
from .layer_options import takes_window, with_options

_EDGES = (256, 512, 1024)
"""Keys at which kernels and planners are known to begin another split, tile or path."""
_ROWS = 4
_ODD_GROUPS = (7, 5, 6)
"""Group sizes that are not powers of two, such as 28 query heads over 4 KV heads."""
_PACKED = 200
"""Number of packed rows, more than one full tile of 128."""
_MOST_ROWS = 40
_PREFIXES = (107, 20)
"""Prefixes; the rows of the first request end after 128 keys."""
_TILES, _NARROW = (32, 64, 128), 11
_DRAFTS_OF_A_KERNEL, _LENGTHS_IN_TURN, _WINDOW = 8, tuple(range(21, 33)), 7
_ONE_ROW = (ForwardMode.DECODE, ForwardMode.DRAFT_DECODE)


def row_edge_cases(declared: Capabilities, tier: str, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``, a case with as little work for each row and key as the declaration allows."""
    rows = min(_ROWS, most_rows(declared, small.mode))
    codes = small.with_changes(data=CODES, layout="shuffled")
    if small.mode is ForwardMode.DECODE:
        lens = tuple(edge + key for edge in _EDGES for key in (-1, 0))
        yield codes.with_changes(prefixes=lens, bucket=len(lens))
    if small.mode in _ONE_ROW or rows < 2:
        return
    if small.mode is ForwardMode.TARGET_VERIFY and declared.bounds.max_q_rows >= _DRAFTS_OF_A_KERNEL:
        # The most rows that kernels of drafts have code for, with all options of a layer: one head of one row was wrong
        # at some lengths (flashinfer #3864).
        drafts = Verify(chain(_DRAFTS_OF_A_KERNEL))
        each = small.of_requests(_LENGTHS_IN_TURN, data="gauss", layout="shuffled", rows=drafts)
        yield with_options(declared, each, _WINDOW).with_changes(kv_dtype=min(declared.kv_pool.kv_dtypes))
    if takes_window(declared, small):
        # Windows that begin on both sides of a tile, in one request's rows: a split has no key of some of them.
        begins = small.with_changes(data="gauss", layout="shuffled")
        begins = _with_rows(begins, rows, tuple(tile + _NARROW - 2 for tile in _TILES))
        yield with_options(declared, begins, max(_NARROW, declared.windows.smallest))
    # With the edge before, in and after the rows.
    yield _with_rows(codes, rows, tuple(edge - 2 for edge in _EDGES))
    if small.heads.layout.wide_rows:
        return
    groups = [group for group in _ODD_GROUPS if group in declared.heads.gqa_ratios and "gqa" in declared.heads.families]
    for group in groups if tier == "full" else groups[:1]:
        many = min(_MOST_ROWS, -(-_PACKED // group), most_rows(declared, small.mode))
        wide = small.with_changes(heads=Heads("gqa", 2 * group, 2), data="gauss")
        yield _with_rows(wide, many, _PREFIXES)


def _with_rows(case: Case, rows: int, prefixes: tuple[int, ...]) -> Case:
    """Requests with this many rows each; if a mode lists rows per request, the last one has fewer."""
    new = (*(rows,) * (len(prefixes) - 1), max(1, rows - 1))
    of_case = case.rows
    if isinstance(of_case, Extend):
        return case.of_requests(prefixes, rows=replace(of_case, new=new, room=room_for(new)))
    if isinstance(of_case, Accepted):
        return case.of_requests(prefixes, rows=replace(of_case, new=new, width=rows))
    return case.of_requests(prefixes, rows=Verify(chain(rows)))
