"""Saying in words where a difference is and how far it spreads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cases.schedule import Step

__all__ = ["number", "requests_wrong", "spread_text", "times"]


def number(value: float) -> str:
    """Short, and never rounded to a lie: nan, inf and tiny values stay what they are."""
    return f"{value:.4g}"


def times(ratio: float) -> str:
    """A ratio to the limit: ``56x``, ``1.3x``; how many millions does not matter."""
    if ratio >= 1e6:
        return "over a million times"
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _ranges(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> ``0-2, 5``."""
    parts: list[list[int]] = []
    for i in indices:
        if parts and parts[-1][1] == i - 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def requests_wrong(wrong: torch.Tensor, row_request: torch.Tensor, count: int) -> list[int]:
    """Requests with a wrong value. ``wrong`` [T, ...] bool, ``row_request`` [T]."""
    rows = wrong.reshape(wrong.shape[0], -1).any(-1)
    hit = torch.zeros(count, dtype=torch.bool)
    hit[row_request[rows]] = True
    return [int(i) for i in hit.nonzero().flatten()]


def spread_text(wrong: torch.Tensor, row_request: torch.Tensor, step: Step) -> str:
    """``request 3 wrong in 33 of 1024 values; requests 0-2 right``. ``wrong`` [T, ...] bool."""
    bad = requests_wrong(wrong, row_request, step.bs)
    good = [i for i in range(step.bs) if i not in bad]
    flat = wrong.reshape(wrong.shape[0], -1)
    mine = torch.isin(row_request, torch.tensor(bad, dtype=row_request.dtype))
    count, total = int(flat[mine].sum()), int(mine.sum()) * flat.shape[1]
    rows = int(flat.any(-1).sum())
    noun = "request" if len(bad) == 1 else "requests"
    text = f"{noun} {_ranges(bad)} wrong in {count} of {total} values ({rows} of {int(mine.sum())} rows)"
    if good:
        text += f"; {'request' if len(good) == 1 else 'requests'} {_ranges(good)} right"
    return text
