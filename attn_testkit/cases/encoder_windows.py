"""Windows of encoder-only layers: consecutive parts of a sequence, in which its rows see each other."""

from __future__ import annotations

import torch

WINDOWS = (5, 24, 11)
"""Rows of the windows of a sequence, in turn; the last window ends with the sequence. As in Qwen2.5-VL, where windows
at the edge of an image are smaller, no product gives the beginning of a window."""


def window_numbers(positions: torch.Tensor) -> torch.Tensor:
    """Number, in its sequence, of the window of each position. ``positions`` int64, of any shape."""
    turns, place = positions // sum(WINDOWS), positions % sum(WINDOWS)
    ends = torch.tensor(WINDOWS).cumsum(0)
    return turns * len(WINDOWS) + torch.bucketize(place, ends, right=True)


def windows_in(rows: int) -> list[int]:
    """Rows of each window of a sequence of ``rows`` rows."""
    found: list[int] = torch.bincount(window_numbers(torch.arange(rows))).tolist()
    return found
