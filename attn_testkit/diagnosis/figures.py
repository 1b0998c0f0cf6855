"""Data of plots of a wrong step, small enough for a results file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks import Comparison
from ..results.finding import ErrorMap, KeyMap
from .attended_keys import AttendedKeys

_MOST_CELLS = 32
"""Most rows, and heads, of a map."""
_MOST = 1e9
"""Largest ratio that is stored, also for NaN and Inf, which exceed any limit."""


def error_map(comparison: Comparison) -> ErrorMap:
    """Map error over limit of each row and head, the largest over layers, dims and counts of KV tokens."""
    by_element, by_row = comparison.ratios
    ratios = torch.stack([by_element.amax(-1), by_row, comparison.key_ratio]).amax((0, 1))
    rows, heads = ratios.shape
    cells = _largest_of_neighbours(_largest_of_neighbours(ratios).T).T
    each = -(-rows // _MOST_CELLS)
    return ErrorMap(
        ratios=tuple(tuple(float(f"{min(ratio, _MOST):.3g}") for ratio in row) for row in cells.tolist()),
        requests=tuple(comparison.expected.data.row_request[::each].tolist()),
        rows=rows,
        heads=heads,
    )


def _largest_of_neighbours(ratios: torch.Tensor) -> torch.Tensor:
    """Reduce [n, m] to [at most 32, m]."""
    each = -(-len(ratios) // _MOST_CELLS)
    return torch.stack([part.amax(0) for part in torch.split(ratios, each)])


def key_map(attended: AttendedKeys) -> KeyMap:
    """Map the attended KV tokens, as ``attended.text`` describes them."""
    return KeyMap(
        request=attended.request,
        row=attended.row,
        head=attended.head,
        length=attended.length,
        used=_runs(sorted(attended.used)),
        wanted=_runs(sorted(attended.wanted)),
        doubled=_runs(sorted(attended.doubled)),
        not_asked=_runs(attended.not_asked),
    )


def _runs(keys: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Convert positions to runs: [0, 1, 2, 7] -> (0, 2), (7, 7)."""
    found: list[tuple[int, int]] = []
    for key in keys:
        if found and found[-1][1] == key - 1:
            found[-1] = (found[-1][0], key)
        else:
            found.append((key, key))
    return tuple(found)
