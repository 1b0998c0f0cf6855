"""Request tables, spans, selections, weights of an indexer and slots of states as columns of wider buffers, which
servers keep.

A block table has as many columns as a batch needs, of a buffer for the longest request; in vLLM its first column is the
slot of a state.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...rows import Extend, room_for
from ...spans import SpanShape
from .variant import ServerVariant

_LENS = (9, 70, 1)
_NEW = (20, 7, 12)
"""New tokens of prompts with spans."""
_COLUMNS = 3


def columns_behind(case: Fields) -> int:
    """Number of columns of such a buffer after those that a backend gets; 0: it gets tensors of their own."""
    return _COLUMNS if WIDER_BUFFERS.word in case.variants else 0


def _fits(declared: Capabilities, case: Fields) -> bool:
    return declared.server.takes_column_views


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    # ``catalogue/state_cases.py`` makes those of layers that keep a state.
    if not declared.server.takes_column_views or declared.state is not None:
        return
    wider = small.of_requests(_LENS, padded=1, data="gauss", variants=frozenset({WIDER_BUFFERS.word}))
    yield wider
    if small.mode in declared.spans.modes:
        new = tuple(min(count, declared.bounds.max_extend_tokens) for count in _NEW)
        rows = Extend(new, room_for(new)) if small.mode is ForwardMode.EXTEND else small.rows
        yield wider.of_requests(_LENS, padded=1, rows=rows, spans=SpanShape())


WIDER_BUFFERS = ServerVariant(
    "wider_buffers",
    "request tables, spans, selected keys, weights of an indexer and slots of states are columns of wider buffers, "
    "with other contents after them",
    "server.takes_column_views",
    _cases,
    _fits,
    alone=True,
    excludes={"loop": "the stages of a loop have tensors of their own"},
    order=170,
    also=("takes_column_views", "strided inputs"),
)
