"""Healthy controls of sparse attention."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import KernelPlan, Sparse
from .catalogue import control
from .sparse import GroupedSparse, SparseBlocks, SparseParent, SparseWithSums, UnionOfRows


@control("sparse-by-positions")
class SparseByPositions(SparseParent):
    """Positions, with holes and empty rows: the parent of the faults of sparse attention."""


@control("sparse-by-slots")
class SparseBySlots(SparseParent):
    """Slots of the KV pool, as a fused top-k writes them, and no holes (sglang PAGED)."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={16, 64}, index_space="slots"))

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()


@control("sparse-sorted-first")
class SparseSortedFirst(SparseParent):
    """Indices are sorted before they are gathered, so that -1 comes first."""

    @override
    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.sort(1).values


@control("sparse-one-width")
class SparseOneWidth(SparseParent):
    """A kernel that knows one width of the selection only, and it is wide."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={64}, holes=True))


@control("sparse-union-of-rows")
class SparseUnionOfRows(UnionOfRows):
    """Two rows share a tile of keys, and padded rows hold -1: the other keys that they gather are finite (sglang)."""


@control("sparse-with-sums")
class SparseWithLogSumExps(SparseWithSums):
    """Log-sum-exps of selected keys, and fewer selections than rows of q."""


@control("sparse-of-groups")
class SparseOfGroups(GroupedSparse):
    """Several KV heads, each with a group of query heads."""


@control("sparse-two-thousand")
class SparseTwoThousand(SparseParent):
    """The width of DeepSeek V3.2."""

    capabilities = SparseParent.capabilities.with_changes(sparse=Sparse(topk={2048}, holes=True))


@control("sparse-blocks")
class SparseByBlocks(SparseBlocks):
    """Blocks of 16 keys, with holes; a row's own block ends with it."""
