"""Output that was never written: which requests, and which values of a head."""

from __future__ import annotations

import torch

from ...checks.describe import index_ranges
from .evidence import Evidence

__all__ = ["columns_not_written", "last_request_not_written"]


def last_request_not_written(e: Evidence) -> str:
    """All of the last request is unwritten, and all others are right."""
    rows, last = e.expected.data.row_request, e.step.bs - 1
    if e.wrong != [last] or last == 0 or e.schedule.case.head_maps or _made_nan(e):
        return ""
    if not e.judgement.unwritten[:, rows == last].all():
        return ""
    return (
        f"no row of request {last}, the last one, is written, and all others are right: offsets of requests "
        "(cu_seqlens_q, indptr) with an entry too few, or a grid or a loop of one request less"
    )


def columns_not_written(e: Evidence) -> str:
    """The same values of every head are unwritten in every wrong row, and others are not."""
    unwritten, heads = e.judgement.unwritten, e.judgement.unwritten.any(-1)
    if not heads.any() or e.schedule.case.head_maps or _made_nan(e):
        return ""
    columns = unwritten[heads]
    if not (columns == columns[0]).all() or columns[0].all():
        return ""
    lost, written = columns[0].nonzero().flatten(), (~columns[0]).nonzero().flatten()
    text = f"values {index_ranges(lost.tolist())} of {columns.shape[-1]} of a head are never written"
    if shift := _shift(e, heads, lost, written):
        return f"{text}, and the others hold what those {abs(shift)} {'behind' if shift > 0 else 'before'} them should"
    return f"{text}: a grid over a head's values that is too small, or an offset of a tile of them"


def _made_nan(e: Evidence) -> bool:
    """Whether the bits of poison are known to be those of a NaN that was read or computed."""
    return e.reads_foreign or e.computes_nan


def _shift(e: Evidence, heads: torch.Tensor, lost: torch.Tensor, written: torch.Tensor) -> int:
    """By how many values the written ones are off, where these are all that the others should be; else 0."""
    if len(lost) != len(written):
        return 0
    out, want, limit = (
        each[heads].double() for each in (e.judgement.out, e.expected.attention, e.expected.attention_limit)
    )
    near = (out[:, written] - want[:, lost]).abs() <= limit[:, lost]
    return int(lost[0] - written[0]) if bool(near.all()) else 0
