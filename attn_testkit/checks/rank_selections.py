"""Mistakes of a rank that attends to selected keys: their positions in the request are not its local indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..contract import KVSplit
from ..families.softmax.attention import attend
from ..families.softmax.limits import lse_limit
from ..steps.data import make_layers
from .rank_reads import RankReads


@dataclass(frozen=True)
class _Misread:
    """One mistake."""

    text: str
    """Words with the fields rank, request, position, index (its local index) and owner (the rank that has it)."""
    only_own: bool
    """True if the rank attends only to the selected keys that it has."""
    index: Callable[[KVSplit, torch.Tensor], torch.Tensor]
    """(rank, positions) -> local indices that the rank reads."""


_POSITION = (
    "rank {rank} used the selected position {position} of request {request} as a local index; the local one is "
    "{index}: a selection names positions in the request, and not keys of a rank"
)
_MISREADS = (
    _Misread(_POSITION, True, lambda split, position: position),
    _Misread(
        "rank {rank} attends to the selected position {position} of request {request}, which rank {owner} has: a rank "
        "attends only to the selected keys that it has",
        False,
        lambda split, position: split.index(position),
    ),
    _Misread(_POSITION + "; and it attends to those of other ranks", False, lambda split, position: position),
)


def misread_selection(reads: RankReads) -> str:
    """The mistake that explains every row, in words; empty if none does, or if the case selects no keys."""
    if reads.case.selection is None or reads.data.allowed is None:
        return ""
    return next((text for misread in _MISREADS if (text := _explained(reads, misread))), "")


def _explained(reads: RankReads, misread: _Misread) -> str:
    data, split = reads.data, reads.split
    assert data.allowed is not None
    allowed = data.allowed[reads.layer]
    position = torch.arange(allowed.shape[-1])
    mine = split.holds(position, torch.zeros_like(position))
    used = allowed & mine if misread.only_own else allowed
    index = misread.index(split, position)
    changed = used & ((split.key(index, torch.tensor(0)) != position) | ~mine)
    if not changed.any():
        return ""
    own = torch.tensor([count for _, count in reads.lens])[:, None, None]
    rows, nan = (data.row_request, data.row_offset), reads.found.isnan().any(1)
    # After the keys of a rank there is NaN. A key of the rank that no row selects may hold NaN, too.
    behind, moved = (used & (index >= own)).any(-1)[rows], changed.any(-1)[rows]
    if bool(((behind & ~nan) | (nan & ~moved)).any()):
        return ""
    right = _right_where(reads, used & (index < own), index) & ~nan
    if not bool((right | nan).all()) or not bool(((right & moved) | behind).any()):
        return ""
    first = changed.nonzero()[0].tolist()
    return misread.text.format(
        rank=split.rank, request=first[0], position=first[2], index=int(split.index(torch.tensor(first[2]))),
        owner=first[2] // split.interleave % split.ranks,
    )  # fmt: skip


def _right_where(reads: RankReads, used: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[T] bool: True for rows that have the log-sum-exps of the keys at ``index`` [S] of the positions ``used``, [B,
    Tmax, S]."""
    data, split = reads.data, reads.split
    read = torch.zeros_like(used)
    request, row, at = used.nonzero(as_tuple=True)
    read[request, row, split.key(index[at], torch.tensor(0))] = True
    layers = [layer if split.sinks else replace(layer, sinks=None) for layer in make_layers(reads.case)]
    allowed = read.expand(len(layers), *read.shape)
    supposed = attend(replace(data, allowed=allowed), layers, data.visible | read)
    lse, limit = supposed.lse[reads.layer], 2 * lse_limit(supposed, reads.case.dtype)[reads.layer]
    return ((reads.found == lse) | ((reads.found - lse).abs() <= limit)).all(1)
