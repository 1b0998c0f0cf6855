"""Batches of more requests than a block of a scan has threads. Fewer are a size of the array (``sizes.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.features.rows import most_rows
from ..cases.layers import Layers
from ..cases.rows import Extend, room_for
from ..contract import Capabilities, ForwardMode

_BLOCK = 1024
"""Requests that one block of a scan covers: a scan that repeats its first block is correct for fewer."""
_MORE = (12, 9, 14, 10, 13, 11)
"""Keys or rows of the requests after the block. The requests at its beginning have 1 to 5."""
_FEW_OF_EACH = 5


def many_request_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases of decode and extend, derived from ``small``, a case with little work for each row and key."""
    one = small.with_changes(layers=Layers(1), layout="shuffled", data="gauss")
    lens = (*(1 + i * _FEW_OF_EACH // _BLOCK for i in range(_BLOCK)), *_MORE)
    if small.heads.layout.wide_rows:
        return
    if small.mode is ForwardMode.DECODE:
        yield one.of_requests(lens)
    if small.mode is ForwardMode.EXTEND:
        rows = min(max(_MORE), most_rows(declared, small.mode))
        new = tuple(min(count, rows) for count in lens)
        yield one.of_requests(tuple(i * 3 // len(new) for i in range(len(new))), rows=Extend(new, room_for(new)))
