"""ALiBi: heads in groups, whose slopes differ, requests of different lengths, and a window where there is one."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.heads import other_heads
from ..cases.dimensions.rows import most_rows
from ..cases.rows import Extend, Verify, room_for
from ..cases.server_variants import usual_page
from ..cases.trees import chain
from ..contract import Capabilities, ForwardMode

_LENS = (130, 9, 1, 40)
_NEW = (7, 70, 3, 1)


def alibi_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """One of each declared mode, made of ``small``, a case with little work for each row and key."""
    if small.mode not in declared.alibi or small.heads.layout.values_in_keys:
        return
    small = small.with_changes(
        heads=other_heads(declared), page_size=usual_page(declared), data="gauss", layout="shuffled", alibi=True,
        window=20 if small.mode in declared.windows.modes else -1,
    )  # fmt: skip
    if small.mode is ForwardMode.EXTEND:
        new = tuple(min(count, most_rows(declared, small.mode)) for count in _NEW)
        yield small.of_requests(_LENS, padded=1, rows=Extend(new, room_for(new)))
        return
    if small.mode is ForwardMode.TARGET_VERIFY:
        small = small.with_changes(rows=Verify(chain(min(4, declared.max_q_rows))))
    yield small.of_requests(_LENS, padded=1)
