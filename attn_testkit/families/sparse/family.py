"""Sparse attention as a family: softmax attention with a selection of keys per layer and row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...cases.data import StepData, make_layers
from ...cases.dimensions.greedy_loop import GREEDY_LOOP
from ...cases.dimensions.kv_splits import KV_SPLITS
from ...cases.dimensions.table import DIMENSIONS
from ...cases.dimensions.window import WINDOW
from ...cases.schedule import Schedule
from ..family import Answer, Family, Supposition
from ..softmax import answer as softmax
from .data import make_sparse_data
from .memory import SPARSE_POOL

__all__ = ["SPARSE"]

_NOT_HERE = (KV_SPLITS, WINDOW, GREEDY_LOOP)


def answer(schedule: Schedule, data: StepData, given: bool) -> Answer:
    """The answer for a step's numbers. The output of a row that selects no key may be any finite number."""
    found = softmax.answer(schedule, data, given)
    assert data.allowed is not None
    empty = ~data.allowed.any(-1)[:, data.row_request, data.row_offset]
    return replace(found, limit=found.limit.masked_fill(empty[..., None, None], math.inf)) if empty.any() else found


def _supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    allowed = data.allowed
    assert allowed is not None
    visible = data.visible.expand_as(allowed)
    topk = schedule.case.selection.topk if schedule.case.selection else 0
    first = torch.arange(visible.shape[-1]) < topk
    latest = visible & (visible.flip(-1).cumsum(-1).flip(-1) <= topk)
    for text, wrong in (
        ("the selection is ignored: the result is that of all keys the row may see", visible),
        ("a layer uses the selection of the layer before it", allowed.roll(1, 0)),
        ("all layers use the selection of the first layer", allowed[:1].expand_as(allowed)),
        ("a row uses the selection of the row before it in its request", allowed.roll(1, 2)),
        ("every row of a request uses the selection of its first row", allowed[:, :, :1].expand_as(allowed)),
        ("every request uses the selection of the first request", allowed[:, :1].expand_as(allowed)),
        (f"the first {topk} keys are attended, not the selected ones", visible & first),
        (f"the last {topk} keys are attended, not the selected ones", latest),
    ):
        supposed = replace(data, allowed=wrong & visible)
        if not torch.equal(supposed.allowed, allowed):  # type: ignore[arg-type]
            yield Supposition(text, answer(schedule, supposed, False))


SPARSE = Family(
    name="sparse",
    dimensions=frozenset(each.name for each in DIMENSIONS) - {each.name for each in _NOT_HERE},
    layers=make_layers,
    data=make_sparse_data,
    memory=SPARSE_POOL,
    answer=answer,
    supposed=_supposed,
    counts_keys=True,
)
