"""Batches of many requests: more than a block of a scan, and the sizes from which on libraries split keys."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.features.rows import most_rows
from ..cases.layers import Layers
from ..cases.rows import Extend, room_for
from ..contract import Capabilities, ForwardMode

_BLOCK = 1024
"""Requests that one block of a scan takes: one that repeats its first block is right for fewer."""
_MORE = (12, 9, 14, 10, 13, 11)
"""Keys or rows of the requests behind the block. Those at its beginning have 1 to 5."""
_FEW_OF_EACH = 5
_SOME_LONG = (32, 132)
"""Libraries split keys, or choose another kernel, from 32 requests on, or from as many as a GPU has processors."""
_LONG, _LONG_OF_MLA = 700, 300
_EVERY = 9
"""One request in so many is long."""


def many_request_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Made of ``small``, a case with little work for each row and key; in decode and extend."""
    one = small.with_changes(layers=Layers(1), layout="shuffled", data="gauss")
    lens = (*(1 + i * _FEW_OF_EACH // _BLOCK for i in range(_BLOCK)), *_MORE)
    if small.mode is ForwardMode.DECODE:
        if not small.heads.layout.wide_rows:
            yield one.of_requests(lens)
        long = _LONG_OF_MLA if small.heads.layout.wide_rows else _LONG
        for count in _SOME_LONG:
            yield one.of_requests(
                tuple(long - i if i % _EVERY == 4 else (1, 3, 9)[i // _EVERY % 3] for i in range(count))
            )
    if small.mode is ForwardMode.EXTEND and not small.heads.layout.wide_rows:
        rows = min(max(_MORE), most_rows(declared, small.mode))
        new = tuple(min(count, rows) for count in lens)
        yield one.of_requests(tuple(i * 3 // len(new) for i in range(len(new))), rows=Extend(new, room_for(new)))
