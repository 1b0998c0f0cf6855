"""Selections, weights of an indexer and slots of states as columns of wider buffers, which servers keep.

The first column of a block table is the slot of a state in vLLM, and its rows are as long as a request may have blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities
from ...fields import C, Fields
from .variant import ServerVariant

_LENS = (9, 70, 1)
_COLUMNS = 3


def columns_behind(case: Fields) -> int:
    """Number of columns of such a buffer after those that a backend gets; 0: it gets tensors of their own."""
    return _COLUMNS if WIDER_BUFFERS.word in case.variants else 0


def _fits(declared: Capabilities, case: Fields) -> bool:
    return declared.server.takes_column_views and (case.selection is not None or case.state is not None)


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if declared.server.takes_column_views and declared.sparse is not None:
        yield small.of_requests(_LENS, padded=1, data="gauss", variants=frozenset({WIDER_BUFFERS.word}))


WIDER_BUFFERS = ServerVariant(
    "wider_buffers",
    "selected keys, weights of an indexer and slots of states are columns of wider buffers, with other contents "
    "after them",
    "server.takes_column_views",
    _cases,
    _fits,
    alone=True,
    excludes={"loop": "the stages of a loop have tensors of their own"},
    order=170,
    also=("takes_column_views", "strided inputs"),
)
