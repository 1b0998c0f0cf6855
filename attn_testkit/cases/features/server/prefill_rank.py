"""Other modes of an instance that is a rank of prefill context parallelism.

Only prompts are dealt (``features/row_ranks.py``). In the other modes each rank has all rows, although its context says
that it is one of R ranks: SGLang has padded the metadata of a verify to a multiple of R (sglang #34443).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ....contract import ROW_ORDERS, Capabilities, ForwardMode, RowSplit
from ...fields import C, Changes, Fields
from .variant import ServerVariant

_LENS = (9, 70, 1)
_RANKS = 5
"""R, of which few numbers of rows are a multiple."""


def _fits(order: str) -> Callable[[Capabilities, Fields], bool]:
    def fits(declared: Capabilities, case: Fields) -> bool:
        # A backend that gathers keys itself needs the other ranks, which only a prompt has.
        ranks = declared.prefill_ranks
        return ranks is not None and order in ranks.orders and not ranks.gathers and case.mode is not ForwardMode.EXTEND

    return fits


def _cases(order: str) -> Callable[[Capabilities, C], Iterator[C]]:
    def cases(declared: Capabilities, small: C) -> Iterator[C]:
        if _fits(order)(declared, small):
            yield small.of_requests(_LENS, padded=1, data="gauss", variants=frozenset({f"{order}_rank"}))

    return cases


def _context(order: str) -> Callable[[Sequence[Any]], Changes]:
    def context(schedules: Sequence[Any]) -> Changes:
        has_it = f"{order}_rank" in schedules[0].case.variants
        return {"row_split": RowSplit(order, _RANKS - 1, _RANKS)} if has_it else {}

    return context


def _variant(order: str, place: int) -> ServerVariant:
    return ServerVariant(
        f"{order}_rank",
        f"the instance is rank {_RANKS - 1} of {_RANKS} that share the rows of prompts ({order}); a step of this mode "
        "has all rows",
        "prefill_ranks",
        _cases(order),
        _fits(order),
        excludes={
            "prompts": "the rows of prompts are dealt, which other words say",
            "multi-mode instance": "prompts of the instance would be dealt",
            "loop": "the model of the loop has no ranks",
            **{f"{other}_rank": "an instance has one order" for other in ROW_ORDERS[: ROW_ORDERS.index(order)]},
        },
        context=_context(order),
        order=place,
    )


ZIGZAG_RANK, ROUNDROBIN_RANK, BLOCKS_RANK = (
    _variant(order, 300 + 10 * number) for number, order in enumerate(ROW_ORDERS)
)
