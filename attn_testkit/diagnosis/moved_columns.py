"""Columns of a head's output that hold the right numbers of other columns: such a head attended to the right keys."""

from __future__ import annotations

import torch

from ..checks import Comparison

_FEWEST, _MOST = 4, 64
"""Fewest wrong heads of rows that show where each column comes from, and the most that are examined."""


def moved_columns(comparison: Comparison) -> list[int] | None:
    """The column whose value each column holds, the same in every wrong head of every row; None if there is no such
    column.

    One-hot values name keys by columns, so exchanged columns would look like missing keys.
    """
    wrong = comparison.wrong.any(-1)
    places = wrong.nonzero().tolist()
    if len(places) < _FEWEST or not comparison.all_finite or comparison.observed.schedule.case.head_maps:
        return None
    out, want = comparison.out.double(), comparison.expected.attention
    limit = comparison.expected.attention_limit.expand_as(want)
    fits = torch.ones(out.shape[-1], out.shape[-1], dtype=torch.bool)
    for layer, row, head in places[:: -(-len(places) // _MOST)]:
        fits &= (out[layer, row, head, :, None] - want[layer, row, head]).abs() <= limit[layer, row, head]
    if not (fits.sum(1) == 1).all():
        return None
    source = fits.int().argmax(1)
    near = ((out - want[..., source]).abs() <= limit[..., source]).all(-1)
    return source.tolist() if bool(near[wrong].all()) else None
