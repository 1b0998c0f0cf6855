"""A step whose scores need more than 2^31 bytes: an indexer's rows times the columns of the request table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....contract import Capabilities, ForwardMode
from ...fields import C, Fields
from ...indexing import Indexing
from ...layers import Layers
from ...plan import Plan
from ...rows import Extend, Verify, room_for
from ...selection import Selection
from ...trees import chain
from ..rows import most_rows
from .variant import ServerVariant

_TOKENS = 1 << 20
_ROWS = (1 << 31) // (4 * _TOKENS) + 8
"""Rows of a step: with a float32 for every column, the last eight begin at 2^31 bytes or later (aiter #4244)."""
_MOST_REQUESTS = 160
"""The most requests; with more, the request table would have more than 700 MB."""
_FEW_HEADS, _MOST_DRAFTED = 8, 16
_KEPT = ("own batch", "own batch, elsewhere", "same lengths, other requests")


def wide_scores_cases(declared: Capabilities, small: C, tier: str) -> Iterator[C]:
    """A prompt, derived from ``small``; in tier full also drafts to verify, because other kernels score their rows.
    Their request table needs 140 MB or more. Few columns of each request are in use.
    """
    sparse = declared.sparse
    if sparse is None or sparse.indexer is None or declared.bounds.max_context_len < _TOKENS:
        return
    if small.mode is not ForwardMode.EXTEND and (small.mode is not ForwardMode.TARGET_VERIFY or tier != "full"):
        return
    each = min(most_rows(declared, small.mode), _MOST_DRAFTED if small.tree else _ROWS)
    count = -(-_ROWS // each)
    if count > _MOST_REQUESTS:
        return
    indexer, topk = sparse.indexer, min(sparse.topk, key=lambda width: (width == 1, width))
    heads = max((heads for heads in indexer.heads if heads <= _FEW_HEADS), default=min(indexer.heads))
    rows = Verify(chain(each)) if small.tree else Extend((each,) * count, room_for((each,) * count))
    one = small.with_changes(
        layers=Layers(1), layout="shuffled", data="gauss", variants=frozenset({WIDE_SCORES.word}),
        selection=Selection.of(sparse, topk),
        indexer=Indexing(heads, indexer.scale == "power_of_two", indexer.fused),
    )  # fmt: skip
    yield one.of_requests((*(9,) * (count - 1), 2 * topk + 9), rows=rows)


def _plans(case: Fields, plans: list[Plan]) -> list[Plan]:
    """Few steps, because backends whose work grows with the context are slow."""
    *steps, oversized = plans
    return [*(replace(plan, eager_too=False) for plan in steps if plan.label in _KEPT), oversized]


WIDE_SCORES = ServerVariant(
    "wide_scores",
    f"max_context_len is {_TOKENS:,}: a float32 for each row and column of the request table is more than 2^31 bytes",
    "an indexer in extend; in full also in target-verify",
    needs_no_capability=True,
    plans=_plans,
    context_len=_TOKENS,
    excludes={
        "empty_batches": "only few steps are run, and none of them without a request",
        "shapes": "only few steps are run",
    },
    order=160,
    also=("max_model_len of a million", "logits beyond 2 GiB"),
)
