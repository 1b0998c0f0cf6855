"""Usual mistakes of a rank that reads the wrong keys of its pool, shown by its log-sum-exps.

A rank counts its keys with local indices, and slots after its keys hold NaN. So a mistake predicts which requests give
NaN on a rank, and the log-sum-exps of all others. A mistake is named only if both fit in every row of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..cases.case import Case
from ..cases.features.kv_splits import has_own_pools, splits_of
from ..contract import KVSplit
from ..families.softmax.attention import attend
from ..steps.data import StepData, make_layers


@dataclass(frozen=True)
class RankReads:
    """The log-sum-exps of one rank in one layer."""

    case: Case
    data: StepData
    layer: int
    rank: int
    found: torch.Tensor
    """Natural log-sum-exps, [T, Hq] float64."""
    want: torch.Tensor
    limit: torch.Tensor
    """Expected values and their limits, in the same shape."""

    @property
    def split(self) -> KVSplit:
        """The rank."""
        return splits_of(self.case)[self.rank]

    @property
    def lens(self) -> list[tuple[int, int]]:
        """Keys of each request on all ranks, and on this one."""
        every = [_last_key(self.data, request) + 1 for request in range(len(self.data.visible))]
        return [(count, _count(self.split, count)) for count in every]


def _last_key(data: StepData, request: int) -> int:
    """Last key of a request, which its last row stores; -1 for a request without rows."""
    mine = data.row_key[data.row_request == request]
    return int(mine.max()) if len(mine) else -1


def _count(split: KVSplit, keys: int) -> int:
    """Number of the first ``keys`` keys of a request that a rank has."""
    return int(split.lens(torch.tensor(keys), torch.tensor(0)))


@dataclass(frozen=True)
class _Misread:
    """One mistake."""

    text: str
    """Words with the fields rank, keys (all of the request), own (those of the rank), used, position and index."""
    indices: Callable[[KVSplit, int, int], torch.Tensor]
    """(rank, keys of a request, page size) -> local indices that the rank reads, [n] int64."""


def _first(count: int) -> torch.Tensor:
    return torch.arange(max(0, count))


def _as_if_dealt(split: KVSplit, keys: int, interleave: int) -> torch.Tensor:
    return _first(_count(replace(split, interleave=interleave), keys))


def _at_global_positions(split: KVSplit, keys: int, page: int) -> torch.Tensor:
    return split.key(_first(_count(split, keys)), torch.tensor(0))


_LENS = "dcp_local_seq_lens has the number of keys on the rank"
_MISREADS = (
    _Misread(
        "rank {rank} used the global length {keys} of request {request} as its local one, which is {own}: " + _LENS,
        lambda split, keys, page: _first(keys),
    ),
    _Misread(
        "rank {rank} used the global position {position} of a key of request {request} as a local slot; the local one "
        "is {index}: req_to_token of a rank has an entry for each key of the rank, and none for others",
        _at_global_positions,
    ),
    _Misread(
        "rank {rank} counts {used} keys of request {request} as for I = 1, but it has {own}: ranks get I tokens at a "
        "time (cp_kv_cache_interleave_size)",
        lambda split, keys, page: _as_if_dealt(split, keys, 1),
    ),
    _Misread(
        "rank {rank} counts {used} keys of request {request} as if ranks got a page at a time, but it has {own}: ranks "
        "get I tokens at a time (cp_kv_cache_interleave_size)",
        lambda split, keys, page: _as_if_dealt(split, keys, page),
    ),
    _Misread(
        "rank {rank} rounds the length of request {request} up to {used} keys, as many as other ranks have, but it has "
        "{own}: the rest is padding, which holds no key",
        lambda split, keys, page: _first(-(-keys // (split.ranks * split.interleave)) * split.interleave),
    ),
    _Misread(
        "rank {rank} attends to {used} keys of request {request}, a part of {keys} consecutive ones, but it has {own}: "
        "tokens are dealt in turn, and not in one block per rank",
        lambda split, keys, page: _first(_of_blocks(split, keys)),
    ),
)  # fmt: skip


def _of_blocks(split: KVSplit, keys: int) -> int:
    """Number of keys of a rank if each rank had one block of consecutive keys."""
    block = -(-keys // split.ranks)
    return min(block, keys - split.rank * block)


def misread_by_rank(reads: RankReads) -> str:
    """The mistake that explains every row, in words; empty if none does, or if ranks share a pool or select keys."""
    if not has_own_pools(reads.case) or reads.case.selection:
        return ""
    return next((text for misread in _MISREADS if (text := _explained(reads, misread))), "")


def _explained(reads: RankReads, misread: _Misread) -> str:
    split, page = reads.split, reads.case.page_size
    indices = [misread.indices(split, keys, page) for keys, _ in reads.lens]
    beyond = [bool((index >= own).any()) for index, (_, own) in zip(indices, reads.lens, strict=True)]
    other = [len(index) != own for index, (_, own) in zip(indices, reads.lens, strict=True)]
    if not any(beyond) and not any(other):
        return ""
    nan = reads.found.isnan().any(1)
    of_request = reads.data.row_request
    for request, predicted in enumerate(beyond):
        if predicted != bool(nan[of_request == request].any()):
            return ""
    if not _right_elsewhere(reads, indices, nan):
        return ""
    request = next(at for at, wrong in enumerate(zip(beyond, other, strict=True)) if any(wrong))
    keys, own = reads.lens[request]
    moved = next(_moved(split, indices[request]), (0, 0))
    return misread.text.format(
        rank=split.rank,
        request=request,
        keys=keys,
        own=own,
        used=len(indices[request]),
        position=moved[0],
        index=moved[1],
    )


def _moved(split: KVSplit, indices: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Index that is read, and the index that should be, of each key that is read in another place."""
    return ((used, index) for index, used in enumerate(indices.tolist()) if used != index)


def _right_elsewhere(reads: RankReads, indices: Sequence[torch.Tensor], nan: torch.Tensor) -> bool:
    """True if rows without NaN have the log-sum-exps that the mistake gives."""
    data, split = reads.data, reads.split
    held = torch.zeros(data.visible.shape[0], data.visible.shape[2], dtype=torch.bool)
    for request, (index, (_, own)) in enumerate(zip(indices, reads.lens, strict=True)):
        held[request, split.key(index[index < own], torch.tensor(0))] = True
    layers = [layer if split.sinks else replace(layer, sinks=None) for layer in make_layers(reads.case)]
    supposed = attend(data, layers, data.visible & held[:, None]).lse[reads.layer]
    limit = reads.limit.where(reads.limit.isfinite(), 0.0).max() * 2
    right = (reads.found == supposed) | ((reads.found - supposed).abs() <= limit)
    return bool((right.all(1) | nan).all())
