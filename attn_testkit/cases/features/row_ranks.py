"""Prefill context parallelism: the rows of each prompt are dealt among ranks, each with all keys in its own pool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...contract import ROW_ORDERS, Capabilities, ForwardMode, RowSplit
from ...glossary import Entry
from ..fields import Changes, Fields
from ..traits import excluded
from .feature import Asked, Bound, Columns, Covered, Draws, Feature, Trait, Without, Word, of_fields
from .kv_splits import has_own_pools
from .numbers import nearer_numbers

_SPELLED = re.compile(r"(\d+)([a-z]+)")
_MOST_AT_RANDOM = 4
_DEALT = {
    "zigzag": "each has two blocks of consecutive rows, one from the start and one from the end",
    "roundrobin": "each has every {ranks}. row",
    "blocks": "each has one block of consecutive rows",
}


def row_splits_of(case: Fields) -> tuple[RowSplit, ...]:
    """The rows of each rank; empty if one instance computes all rows."""
    spelled = _SPELLED.fullmatch(case.row_ranks)
    if spelled is None:
        return ()
    return tuple(RowSplit(spelled[2], rank, int(spelled[1])) for rank in range(int(spelled[1])))


def ranks_have_no_order(case: Fields) -> bool:
    """True if the case has ranks that may run in any order: no state passes from rank to rank."""
    return has_own_pools(case) or (bool(case.row_ranks) and case.state is None)


def _orders(declared: Capabilities, mode: ForwardMode) -> tuple[str, ...]:
    if declared.prefill_ranks is None or mode is not ForwardMode.EXTEND:
        return ()
    return tuple(order for order in ROW_ORDERS if order in declared.prefill_ranks.orders)


def _order(case: Fields) -> str:
    return next((split.order for split in row_splits_of(case)), "")


def _phrase(case: Fields) -> str:
    ranks = len(row_splits_of(case))
    return f"{ranks} ranks, each with all keys; {_DEALT[_order(case)].format(ranks=ranks)}" if ranks else ""


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    splits = row_splits_of(case)
    yield from ({"row_ranks": f"{fewer}{splits[0].order}"} for fewer in nearer_numbers(len(splits) or 2, 2))


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    """The numbers of ranks differ, so that orders are tried with few and with many ranks."""
    dealt = [f"{ranks}{order}" for ranks, order in zip((2, 3, 2), _orders(declared, mode), strict=False)]
    return {"row_ranks": ["", *dealt]} if dealt else {}


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    orders = _orders(declared, so_far["rows"].mode)
    order = draws.one_of(["", *orders]) if orders else ""
    found = {"row_ranks": f"{draws.number(2, _MOST_AT_RANDOM)}{order}" if order else ""}
    return {} if excluded(Fields(**{**so_far, **found})) else found


def _eager_only(declared: Capabilities, case: Fields) -> str:
    return "servers run prompts whose rows are spread over ranks without graphs" if case.row_ranks else ""


DEALT = Columns(_columns, further=("row_ranks",))
ROW_RANKS = Feature(
    name="row ranks",
    order=295,
    fields=("row_ranks",),
    traits=(
        Trait(
            "rows on ranks",
            lambda case: bool(case.row_ranks),
            excludes={
                "no prompts": "the rows of a prompt are dealt; each rank decodes all rows",
                "loop": "the model of the loop has no ranks",
                "multi-mode instance": "the other modes of the instance have no ranks",
                "KV splits": "each rank attends to all keys at once",
                "KV groups": "each rank has one pool with all layers",
                "heads by layer": "the memory of a rank has layers of one shape",
                "selected keys": "a selection of each row would have to be dealt, too",
                "bidirectional spans": "a row would need the rows after it, which are on other ranks",
                "cross-attention layers": "keys of the encoder are not dealt",
                "additive bias": "a bias has a row for each row of the step",
                "packed rows": "the memory of a rank is compared bit for bit",
                "snapshots of states": "a chunk ends on one of the ranks only",
                "states of a prefix cache": "only the first rank would continue the state of another slot",
                "hybrid layers": "keys are on all ranks, and a state is on one",
                "server variants": "each of them changes the rows or the memory of a batch",
                "layers that share KV": "each rank stores the keys of all layers",
            },
        ),
    ),
    words=(
        Word(
            rf"pcp((?P<ranks>\d+)(?:{'|'.join(ROW_ORDERS)}))",
            lambda match, so_far: {"row_ranks": match[1]},
            lambda case: f"pcp{case.row_ranks}" * bool(case.row_ranks),
            bounds=(Bound("number of ranks", 2, 64, "ranks"),),
        ),
    ),
    explained=(
        Entry(
            "pcp3zigzag",
            "Prefill context parallelism: 3 ranks compute the rows of each prompt. Rank r has blocks r and 5 - r of 6.",
            also=("PCP", "prefill context parallelism", "pcp_world_size", "zigzag"),
            page="how-to/context-parallelism.md",
            numbers=True,
        ),
        Entry(
            "pcp3roundrobin",
            "Prefill context parallelism: row j of a prompt is on rank j % 3.",
            also=("round robin",),
            page="how-to/context-parallelism.md",
            numbers=True,
        ),
        Entry(
            "pcp3blocks",
            "Prefill context parallelism: each of 3 ranks has one block of consecutive rows of each prompt.",
            page="how-to/context-parallelism.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"row_ranks": _phrase(case)},
    declared=(
        Asked(
            lambda case: f"prefill ranks: {_order(case)}",
            lambda declared, case: not case.row_ranks or _order(case) in _orders(declared, case.mode),
        ),
    ),
    eager_only=_eager_only,
    values=DEALT,
    covered=(
        Covered(
            "row_ranks",
            "prefill ranks:",
            _orders,
            lambda declared, case: _order(case) or None,
            Without("catalogue/row_ranks.py has every order."),
        ),
    ),
    simpler=of_fields("row_ranks", size=lambda case, minimal: (len(row_splits_of(case)),), steps=_fewer),
    undeclared=Without("So far no context asks for undeclared orders."),
    random=_random,
    varies="instance",
    apply=Without("runner_modes/row_ranks.py gives each rank its rows, and joins the outputs."),
)
