"""Sparse attention as a family: softmax attention with a selection of keys per layer and row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...cases.features.greedy_loop import GREEDY_LOOP
from ...cases.features.table import FEATURES
from ...cases.features.window import WINDOW
from ...steps.data import StepData, make_layers
from ...steps.index_data import IndexData
from ...steps.schedule import Schedule
from ..family import Answer, Family, Question, Supposition
from ..softmax import answer as softmax
from ..softmax.packed_rows import misread_rows
from .data import attended_by, heads_with_keys, make_sparse_data, visible_of
from .index_scores import best_keys
from .memory import SPARSE_POOL
from .misread_heads import misread_heads
from .misread_indices import supposed_of_slots

_NOT_HERE = (WINDOW, GREEDY_LOOP)


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """The answer for a step's data. The output of a row that selects no key may be any finite number."""
    data = with_selection(schedule, data)
    found = softmax.answer(schedule, data, given)
    assert data.allowed is not None
    empty = ~heads_with_keys(data)
    return replace(found, limit=found.limit.masked_fill(empty[..., None], math.inf)) if empty.any() else found


def with_selection(schedule: Schedule, data: StepData) -> StepData:
    """Return the data with the keys that each row attends to: the given keys, or those with the best scores."""
    if not isinstance(data.index, IndexData):
        return data
    keys = best_keys(schedule, data, data.index)
    return replace(data, allowed=attended_by(data, keys), selected=keys)


_TILE, _TILES = 16, 16
"""Narrowest tile of columns, and the most tiles of a selection, among which a lost tile is searched."""


def _misread(schedule: Schedule, data: StepData) -> Iterator[tuple[str, torch.Tensor]]:
    """Mistakes about the columns of ``selected``, and the keys [L, T, topk] that are attended to in each."""
    keys, selection = data.selected, schedule.case.selection
    assert keys is not None
    assert selection is not None
    draft = schedule.case.draft
    if selection.slots or selection.block > 1 or (draft is not None and draft.branches > 1):
        # Only a position in a chain is the place of its key.
        return
    keys = keys.long()
    column = torch.arange(keys.shape[-1])
    yield "-1 in a row of `selected` is attended to as key 0", keys.clamp(min=0)
    yield "the keys of a row after its first -1 are not attended to", keys.masked_fill((keys < 0).cumsum(-1) > 0, -1)
    behind = column > keys.argmax(-1, keepdim=True)
    yield (
        "the keys of a row after its largest index are not attended to, as if indices ascended",
        keys.masked_fill(behind, -1),
    )
    wide = max(_TILE, selection.topk // _TILES)
    for tile in range(wide, selection.topk, wide):
        text = f"only the first {tile} of {selection.topk} columns of `selected` are attended to"
        yield text, keys.masked_fill(column >= tile, -1)


def _counted_zeros(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    """Answers if entries of -1 load zeros and still count in the denominator: all of them, or a tile's."""
    keys, right = data.selected, softmax.answer(schedule, data, False)
    if keys is None or right.key_sum is None or data.by_head:
        return
    column = torch.arange(keys.shape[-1])
    last = column.masked_fill(keys < 0, -1).amax(-1, keepdim=True)
    counted = {"of -1": keys < 0}
    for tile in (16, 32, 64, 128):
        counted[f"after the last key in its tile of {tile}"] = (
            (keys < 0) & (column // tile == last // tile) & (last >= 0)
        )
    for where, zeros in counted.items():
        part = right.key_sum / (right.key_sum + zeros.sum(-1)[..., None])
        yield Supposition(
            f"entries of `selected` {where} load zeros and still count in the denominator, each with a logit of 0",
            replace(right, out=right.out * part[..., None]),
        )


def _supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    data = with_selection(schedule, data)
    allowed = data.allowed
    assert allowed is not None
    visible = visible_of(data)
    topk = schedule.case.selection.keys if schedule.case.selection else 0
    first = torch.arange(visible.shape[-1]) < topk
    causal = data.key_positions[:, None] <= data.query_positions[..., None]
    causal = causal.unsqueeze(2) if data.by_head else causal
    latest = visible & (visible.flip(-1).cumsum(-1).flip(-1) <= topk)
    yield from (
        Supposition(text, softmax.answer(schedule, each, False)) for text, each in misread_heads(schedule, data)
    )
    for text, wrong in (
        ("the selection is ignored: the result is that of all keys the row may see", visible),
        ("a layer uses the selection of the layer before it", allowed.roll(1, 0)),
        ("all layers use the selection of the first layer", allowed[:1].expand_as(allowed)),
        ("a row uses the selection of the row before it in its request", allowed.roll(1, 2)),
        ("every row of a request uses the selection of its first row", allowed[:, :, :1].expand_as(allowed)),
        ("every request uses the selection of the first request", allowed[:, :1].expand_as(allowed)),
        ("selected keys after its own are masked, and layers of this case are not causal", allowed & causal),
        (f"the first {topk} keys are attended to, not the selected ones", visible & first),
        (f"the last {topk} keys are attended to, not the selected ones", latest),
    ):
        supposed = replace(data, allowed=wrong & visible)
        if not torch.equal(supposed.allowed, allowed):  # type: ignore[arg-type]
            yield Supposition(text, softmax.answer(schedule, supposed, False))
    for text, misread in misread_rows(data):
        yield Supposition(text, softmax.answer(schedule, misread, False))
    for text, keys in _misread(schedule, data):
        yield Supposition(
            text, softmax.answer(schedule, replace(data, allowed=attended_by(data, keys) & visible), False)
        )
    # Lost keys can look like counted zeros where every value lost is small: those are asked about first.
    yield from _counted_zeros(schedule, data)


SPARSE = Family(
    name="sparse",
    features=frozenset(each.name for each in FEATURES) - {each.name for each in _NOT_HERE},
    layers=make_layers,
    data=make_sparse_data,
    memory=SPARSE_POOL,
    answer=answer,
    supposed=_supposed,
    supposed_of_slots=supposed_of_slots,
    poisoned="unowned slots and keys that no row selects",
    unread="keys that no row selects",
    with_unread_finite=lambda step: replace(step, index=0, part_of=None),
    counts_keys=True,
    questions=frozenset({Question.ATTENDED_KEYS, Question.NAMED_PATTERNS}),
)
