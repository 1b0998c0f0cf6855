"""The wrong rows are right for another length than their request's: that of another request."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...cases.data import StepData
from ...cases.ways import way_of
from .evidence import LONGEST, SMALLEST_TILE, Evidence

__all__ = ["lengths_of_others"]

_MOST_LENGTHS = 24
"""Lengths that are asked about."""
_FEW = 2
"""Fewer wrong requests may have the length of another one by chance."""


def lengths_of_others(e: Evidence) -> str:
    """Every wrong request is right with the length of another one."""
    if not _can_be_asked(e):
        return ""
    lens, new = e.lens, [request.new for request in e.step.requests]
    found: dict[int, set[int]] = {request: set() for request in e.wrong}
    for length in sorted(set(lens))[:_MOST_LENGTHS]:
        for request in _right_with(e, length):
            found[request].add(length)
    if any(not lengths for lengths in found.values()) or len(found) < _FEW:
        return ""
    # Where all are cut to their new rows, what is missing is the prefix; where all lack as many, an end is off.
    told = [(request, length) for request, lengths in found.items() for length in lengths if length > new[request]]
    if not told or len({lens[request] - max(length, new[request]) for request, length in told}) == 1 < len(told):
        return ""
    if same := set.intersection(*found.values()):
        return _of_one(e, min(same))
    named = ", ".join(f"request {i} with that of request {lens.index(length)}, {length}" for i, length in told[:2])
    more = " and so on" if len(found) > _FEW else ""
    return f"right with lengths of other requests, {named}{more}: look at the index by which a list of lengths is read"


def _of_one(e: Evidence, length: int) -> str:
    """One length makes all wrong requests right. Where just those are wrong that are longer, it may be a capacity."""
    longer = [request for request, own in enumerate(e.lens) if own > length]
    if e.wrong == longer and length % SMALLEST_TILE == 0:
        return ""
    return (
        f"every wrong request is right with the length of request {e.lens.index(length)}, {length} (or its new rows, "
        "where they are more): look at which requests a list of lengths has, and at the index by which it is read"
    )


def _right_with(e: Evidence, length: int) -> list[int]:
    """The wrong requests that are longer, and whose wrong rows are what they should be with this length."""
    shorter = [i for i in e.wrong if e.lens[i] > max(length, e.step.requests[i].new)]
    if not shorter:
        return []
    rows = e.expected.data.row_request
    return [i for i in shorter if e.right_for(_with_length(e, length), of_rows=rows == i)]


def _with_length(e: Evidence, length: int) -> StepData:
    """Each request of no more than so many KV tokens, and no fewer than its new rows; the last row sees the last."""
    data = e.expected.data
    new = torch.tensor([request.new for request in e.step.requests])
    cut = torch.minimum(torch.tensor(e.lens), new.clamp(min=length))
    positions = (cut - new)[:, None] + torch.arange(data.query_positions.shape[1])
    visible = data.key_positions[:, None] <= positions[:, :, None]
    return replace(data, query_positions=positions, visible=visible)


def _can_be_asked(e: Evidence) -> bool:
    case, judgement, requests = e.schedule.case, e.judgement, e.step.requests
    if case.head_maps or max(e.lens, default=0) > LONGEST or e.swapped or not way_of(case).causal:
        return False
    if any(r.draft or (r.tree is not None and r.tree.topk > 1) for r in requests):
        return False
    own = e.attended is None or not (e.attended.right or e.attended.elsewhere or e.attended.heads)
    return own and judgement.all_finite and not judgement.right and judgement.worst is not None
