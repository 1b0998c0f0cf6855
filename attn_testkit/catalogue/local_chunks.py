"""Chunked-local layers: rows at both ends of a chunk, and rows of one request in two chunks."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.rows import most_rows
from ..cases.rows import Extend, Verify, room_for
from ..cases.server_variants import usual_page
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode

_CHUNK = 64
_NEW = (7, 70, 3, 1, 20)


def local_chunk_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """One of each declared mode, made of ``small``, a case with little work for each row and key."""
    if small.mode not in declared.windows.chunked:
        return
    small = small.with_changes(page_size=usual_page(declared), data="gauss", layout="shuffled")
    lens = (_CHUNK - 1, _CHUNK, 2 * _CHUNK - 3, 9, 3 * _CHUNK + 1)
    if small.mode is ForwardMode.EXTEND:
        new = tuple(min(count, most_rows(declared, small.mode)) for count in _NEW)
        yield small.of_requests(lens, padded=1, rows=Extend(new, room_for(new)), local_chunk=_CHUNK)
        return
    if small.mode is ForwardMode.TARGET_VERIFY:
        small = small.with_changes(rows=Verify(chain(min(4, declared.max_q_rows))))
    yield small.of_requests(lens, padded=1, local_chunk=_CHUNK)
