"""Cases of prefill context parallelism: lengths at the borders of blocks, which the covering array cannot say."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import CODES, Case
from ..cases.head_layouts import latent, latent_heads
from ..cases.rows import Extend, room_for
from ..contract import ROW_ORDERS, Capabilities, ForwardMode
from .layer_options import with_options, without_options

_LONG = 150
_MANY_RANKS = 8


def row_rank_cases(declared: Capabilities, small: Case, tier: str) -> Iterator[Case]:
    """Cases derived from ``small``, an extend with as little work for each row as the declaration allows. Smoke has one
    for each order.

    Prompts have as many rows as there are blocks, one more, one less, and so few that most ranks have none. Servers cut
    a prompt into 2R blocks; the first blocks have the rows that are left over (sglang #27276, #30439). Some prompts
    continue a prefix, so the number of a row is not its position.
    """
    if declared.prefill_ranks is None or small.mode is not ForwardMode.EXTEND:
        return
    orders = [order for order in ROW_ORDERS if order in declared.prefill_ranks.orders]
    plain = without_options(declared, small)
    for order in orders:
        for ranks in (2, 3) if tier != "smoke" else (2,):
            yield _dealt(declared, plain, ranks, order, _around(2 * ranks)).with_changes(data="gauss")
        if tier == "smoke":
            continue
        yield _dealt(declared, plain, 4, order, ((0, _LONG), (33, 2), (0, 17))).with_changes(data=CODES)
        # No prompt has a row for each of the eight ranks.
        yield _dealt(declared, plain, _MANY_RANKS, order, ((0, 3), (7, 1), (20, 5))).with_changes(data="gauss")
        # One request, as in servers that deal one prompt at a time, and chunks that continue it.
        yield _dealt(declared, plain, 2, order, ((0, 96),)).with_changes(data="gauss")
        options = _dealt(declared, with_options(declared, small, 20), 3, order, ((0, 70), (41, 13)))
        yield options.with_changes(kv_dtype=min(declared.kv_pool.kv_dtypes), data="gauss")
    if tier != "smoke" and not small.heads.layout.values_in_keys and latent(declared) and declared.heads.mla_rope_dims:
        few = max([group for group in declared.heads.gqa_ratios if group <= 4], default=1)
        other = plain.with_changes(heads=latent_heads(declared, few), rope_dim=min(declared.heads.mla_rope_dims))
        yield _dealt(declared, other, 2, orders[0], _around(4)).with_changes(data="gauss")


def state_rank_cases(declared: Capabilities, plain: Case) -> Iterator[Case]:
    """Cases of layers that keep a state, derived from ``plain``: blocks that are shorter than the window of the
    convolution, so that it holds rows of two ranks or more, and ranks without rows."""
    if declared.prefill_ranks is None or plain.mode is not ForwardMode.EXTEND:
        return
    for ranks, prompts in (
        (2, ((0, 65), (40, 3), (0, 1))),
        (3, ((0, 7), (5, 4), (0, 2), (17, 70))),
        (_MANY_RANKS, ((0, 13), (9, 6))),
        (_MANY_RANKS, ((0, 5), (9, 2))),
    ):
        yield _dealt(declared, plain, ranks, "blocks", prompts)


def _around(blocks: int) -> tuple[tuple[int, int], ...]:
    """Prefixes and rows of prompts of about as many rows as blocks."""
    return ((0, blocks), (5, blocks + 1), (0, blocks - 1), (9, 1), (16, 3 * blocks + 2))


def _dealt(declared: Capabilities, small: Case, ranks: int, order: str, prompts: tuple[tuple[int, int], ...]) -> Case:
    """``small`` with other prompts, each a prefix and a number of rows."""
    new = tuple(min(each, declared.bounds.max_extend_tokens) for _, each in prompts)
    prefixes = tuple(prefix for prefix, _ in prompts)
    return small.with_changes(
        prefixes=prefixes, rows=Extend(new, room_for(new)), bucket=len(prefixes), padding="prod",
        row_ranks=f"{ranks}{order}",
    )  # fmt: skip
