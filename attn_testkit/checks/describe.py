"""Descriptions of a difference: where it is and how far it spreads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..steps.data import StepData
from ..steps.schedule import Step


def number(value: float) -> str:
    """Format a number in four digits; nan, inf and tiny values remain recognizable."""
    return f"{value:.4g}"


def times(ratio: float) -> str:
    """Format a ratio to the limit: ``56x``, ``3.4x``, ``1.02x``, ``over a million times``."""
    if ratio >= 1e6:
        return "over a million times"
    if ratio < 2:
        return f"{ratio:.2f}x" if ratio >= 1.005 else "just"
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def index_ranges(indices: Sequence[int]) -> str:
    """Format indices as ranges: [0, 1, 2, 5] -> ``0-2, 5``."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and parts[-1][1] == i - 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def row_name(data: StepData, row: int) -> str:
    """Name a flat row: ``request 1 row 0``, or ``request 1`` if the request has only one row."""
    request, offset = int(data.row_request[row]), int(data.row_offset[row])
    several = int((data.row_request == request).sum()) > 1
    return f"request {request}" + (f" row {offset}" if several else "")


def requests_wrong(wrong: torch.Tensor, row_request: torch.Tensor, count: int) -> list[int]:
    """List the requests, of ``count``, with a wrong value. ``wrong`` [T, ...] bool, ``row_request`` [T] int64."""
    rows = wrong.reshape(wrong.shape[0], -1).any(-1)
    hit = torch.zeros(count, dtype=torch.bool)
    hit[row_request[rows]] = True
    return [int(i) for i in hit.nonzero().flatten()]


def spread_text(wrong: torch.Tensor, row_request: torch.Tensor, step: Step) -> str:
    """Describe a spread: ``request 3 wrong in 33 of 1024 values (1 of 1 rows); requests 0-2 right``.

    ``wrong`` [T, H, D] bool. Rows, heads and dims are named if only some are wrong, the same in every wrong request or
    row.
    """
    bad = requests_wrong(wrong, row_request, step.bs)
    good = [i for i in range(step.bs) if i not in bad]
    flat = wrong.reshape(wrong.shape[0], -1)
    mine = torch.isin(row_request, torch.tensor(bad, dtype=row_request.dtype))
    count, total = int(flat[mine].sum()), int(mine.sum()) * flat.shape[1]
    rows = int(flat.any(-1).sum())
    noun = "request" if len(bad) == 1 else "requests"
    text = f"{noun} {index_ranges(bad)} wrong in {count} of {total} values ({rows} of {int(mine.sum())} rows"
    text += f"{_rows_text(flat.any(-1), row_request, bad)})"
    if good:
        text += f"; {'request' if len(good) == 1 else 'requests'} {index_ranges(good)} right"
    return text + (_parts_text(wrong) if wrong.dim() == 3 else "")


def _rows_text(wrong: torch.Tensor, row_request: torch.Tensor, bad: Sequence[int]) -> str:
    """Name the wrong rows, as ``: 8-15``, if they are the same in every wrong request and other rows are right."""
    found = {tuple(wrong[row_request == i].nonzero().flatten().tolist()) for i in bad}
    some = all(len(rows) > 0 for rows in found) and all(not bool(wrong[row_request == i].all()) for i in bad)
    return f": {index_ranges(found.pop())}" if some and len(found) == 1 else ""


def _parts_text(wrong: torch.Tensor) -> str:
    """Name ``; heads 3-5 of 6`` and ``; dims 64-95 of 96`` if the others are right in every row. [T, H, D] bool."""
    _, heads, dims = wrong.shape
    text = ""
    at = wrong.any(-1).any(0).nonzero().flatten().tolist()
    if 0 < len(at) < heads:
        each = bool(wrong.any(-1)[wrong.flatten(1).any(-1)][:, at].all())
        rows = " in every wrong row" if each and int(wrong.flatten(1).any(-1).sum()) > 1 else ""
        text += f"; only head{'s' if len(at) > 1 else ''} {index_ranges(at)} of {heads}{rows}"
    at = wrong.any(0).any(0).nonzero().flatten().tolist()
    # Whole fours: with one-hot values a run of dims is a run of keys, of any length.
    if 1 < len(at) < dims and at[-1] - at[0] == len(at) - 1 and at[0] % 4 == len(at) % 4 == 0:
        text += f"; only dims {index_ranges(at)} of {dims}"
    return text
