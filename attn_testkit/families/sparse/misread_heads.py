"""Selections of KV heads that a backend looks up in the wrong way, and the keys that each head then attends to.

The sets of a step are `selected` [T, Hk, topk], in memory set after set. A kernel that indexes them by something else
reads the set of another head, and with it maybe the set of another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...steps.data import StepData
from ...steps.schedule import Schedule
from .data import attended_by

_OF_HEAD_0 = "all KV heads use the selection of KV head 0: `selected` is [T, Hk, topk]"
_OF_NEIGHBOR = "a KV head uses the selection of the KV head {} it"
_UNION = "all KV heads attend to the union of their selections: each should attend only to the keys that it selected"
_BY_QUERY_HEAD = (
    "query head h uses set h of its row, as if `selected` had one per query head: it has one per KV head, h // {group}"
)
_INTERLEAVED = "query head h uses the selection of KV head h % {kv_heads}: heads of a group are next to each other"
_OF_FIRST_REQUEST = (
    "every request uses the selection of the first request: `selected` has a row for each row of the batch, and not of "
    "a request"
)
_HEAD_MAJOR = "`selected` is read as [Hk, T, topk], and it is [T, Hk, topk]"


def misread_heads(schedule: Schedule, data: StepData) -> Iterator[tuple[str, StepData]]:
    """Mistakes about the axis of heads of ``selected``, and data in which each head attends to the keys that it then
    would. Nothing if all heads of a row have one selection, or there is one KV head.
    """
    allowed, selection = data.allowed, schedule.case.selection
    if not data.by_head or allowed is None or data.selected is None or selection is None or allowed.shape[3] < 2:
        return
    kv_heads, heads = allowed.shape[3], data.q.shape[2]
    yield _OF_HEAD_0, replace(data, allowed=allowed[:, :, :, :1].expand_as(allowed))
    for back, which in ((1, "before"), (-1, "after")):
        yield _OF_NEIGHBOR.format(which), replace(data, allowed=allowed.roll(back, 3))
    yield _UNION, replace(data, allowed=allowed.any(3, keepdim=True).expand_as(allowed))
    if heads > kv_heads:
        of_head = torch.arange(heads) % kv_heads
        yield _INTERLEAVED.format(kv_heads=kv_heads), replace(data, allowed=allowed[:, :, :, of_head])
    if selection.space != "positions":
        # A page of another request has none of the keys of this one.
        return
    rows, every_head = torch.arange(len(data.row_request))[:, None], torch.arange(kv_heads)
    yield _OF_FIRST_REQUEST, _with_sets(data, data.row_offset[:, None] * kv_heads + every_head, selection.block)
    if heads > kv_heads:
        text = _BY_QUERY_HEAD.format(group=heads // kv_heads)
        yield text, _with_sets(data, rows * kv_heads + torch.arange(heads), selection.block)
    yield _HEAD_MAJOR, _with_sets(data, every_head * len(rows) + rows, selection.block)


def _with_sets(data: StepData, sets: torch.Tensor, block: int) -> StepData:
    """Data in which each head of a row uses set number ``sets`` [T, heads], or the last one. An index that the request
    does not have selects nothing."""
    assert data.selected is not None
    every = data.selected.long().flatten(1, 2)
    found = every[:, sets.clamp(max=every.shape[1] - 1)]
    found = found.masked_fill(found * block >= data.key_positions.shape[1], -1)
    return replace(data, allowed=attended_by(data, found, block) & data.visible[:, :, None])
