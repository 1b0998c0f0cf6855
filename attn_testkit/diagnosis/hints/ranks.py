"""A rank of decode context parallelism reads wrong keys from its pool."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ...cases.features.kv_splits import has_own_pools, splits_of
from ...checks.rank_reads import RankReads, misread_by_rank
from ...checks.rank_selections import misread_selection
from .evidence import Evidence
from .hint import Level, hint


def _of_ranks(e: Evidence) -> bool:
    return has_own_pools(e.schedule.case)


@hint(Level.CAUSE, when=_of_ranks)
def misread_rank(e: Evidence) -> str:
    """The log-sum-exps of a rank are those of other keys than its own."""
    want, limit = e.expected.lse, e.expected.lse_limit
    held = list(e.observed.copies.group("lse").values())
    if want is None or limit is None or len(held) != len(want):
        return ""
    return next(filter(None, _misread(e, torch.stack(held).double(), want, limit)), "")


def _misread(e: Evidence, held: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> Iterator[str]:
    """Texts for wrong log-sum-exps [L, T, R, Hq], in both bases, empty if no mistake explains them.

    If the backend merges, one more follows those of the R ranks, and is left out.
    """
    case, data = e.schedule.case, e.expected.data
    wrong = (~((held - want).abs() <= limit) & (held != want))[:, :, : len(splits_of(case))]
    for layer, rank in wrong.movedim(2, 1).flatten(2).any(-1).nonzero().tolist()[:_MOST_TRIED]:
        at = layer, slice(None), rank
        for factor in (1.0, math.log(2)):
            reads = RankReads(case, data, layer, rank, held[at] * factor, want[at], limit[at])
            yield misread_by_rank(reads) or misread_selection(reads)


_MOST_TRIED = 8
"""Number of wrong ranks of layers for which mistakes are tried: each needs several runs of the oracle."""
