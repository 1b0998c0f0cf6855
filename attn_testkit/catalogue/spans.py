"""Bidirectional spans: requests with several spans next to one without any; in one case without further options."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.dimensions.heads import other_heads
from ..cases.dimensions.rows import most_rows
from ..cases.rows import Extend, room_for
from ..cases.server_variants import usual_page
from ..cases.spans import SpanShape
from ..contract import Capabilities, ForwardMode

_LENS = (9, 130, 0, 40, 64)
_NEW = (70, 7, 40, 20, 35)
_WINDOW = 20


def span_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Spans in the rows of the step, and spans of every declared kind with a window and other options. Decode has only
    the second. ``small`` has little work for each row and key.
    """
    mode, spans = small.mode, declared.spans
    if mode not in spans.modes or small.heads.layout.values_in_keys:
        return
    small = small.with_changes(
        heads=other_heads(declared), page_size=usual_page(declared), data="gauss", layout="shuffled"
    )
    if mode is ForwardMode.EXTEND:
        new = tuple(min(count, most_rows(declared, mode)) for count in _NEW)
        small = small.of_requests(_LENS, padded=1, rows=Extend(new, room_for(new)))
        yield small.with_changes(spans=SpanShape())
    else:
        small = small.of_requests(_LENS, padded=1)
    windows = mode in declared.windows.modes
    shape = SpanShape(spans.of_prefix and mode is ForwardMode.EXTEND, spans.wider_than_window and windows,
                      spans.by_layer)  # fmt: skip
    yield small.with_changes(
        spans=shape,
        window=max(_WINDOW, declared.windows.smallest) if windows else -1,
        layer_windows=declared.windows.layers if windows else "any",
        logit_cap=30.0 if declared.logit_cap else 0.0,
        sinks=declared.sinks,
    )
