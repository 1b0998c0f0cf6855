"""Requests without rows between others, in extend.

A rank of prefill context parallelism gets none of a short request's tokens, so equal offsets are next to each other.
Kernels that number chunks, tiles or work items without such requests look up the wrong request by that number
(vllm-ascend #11807).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.rows import most_rows
from ..cases.rows import Extend, room_for
from ..cases.server_variants import usual_page
from ..contract import Capabilities, ForwardMode
from .indexer_cases import with_indexer

_LENS = (9, 33, 0, 20, 70, 5, 1, 12)
_NEW = (0, 17, 0, 3, 0, 0, 2, 0)
"""New tokens: none for the first and the last request, for one between two, which has no key either, and for two next
to each other."""
_CHUNKS = 3
_EVEN = (0, 4, 4, 0, 4, 0, 0, 4)
"""Few new tokens, as many for each request that has any: a batch that looks like one of drafts (vLLM #52500)."""


def requests_without_rows_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Three cases of extend, made of ``small``, a case with little work for each row and key: the second in chunks, the
    third with an even number of rows, and with an indexer where that is declared.
    """
    if small.mode is not ForwardMode.EXTEND or not declared.server.takes_requests_without_rows:
        return
    new = tuple(min(count, most_rows(declared, small.mode)) for count in _NEW)
    rows, page = Extend(new, room_for(new)), usual_page(declared)
    case = small.of_requests(_LENS, padded=1, rows=rows, page_size=page, data="gauss", layout="shuffled")
    yield case
    yield case.with_changes(rows=Extend(new, rows.room, _CHUNKS), layout="interleaved", padding="nan")
    even = tuple(min(count, most_rows(declared, small.mode)) for count in _EVEN)
    of_equal = case.with_changes(rows=Extend(even, room_for(even)))
    yield with_indexer(declared, of_equal) if declared.sparse and declared.sparse.indexer else of_equal
