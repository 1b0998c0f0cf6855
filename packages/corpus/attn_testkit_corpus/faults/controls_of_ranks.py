"""Healthy controls of decode context parallelism, in the forms of real servers."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_testkit.contract import ForwardBatch

from .catalogue import control
from .with_ranks import MERGED_ON_RANKS, MergingRankBackend, RankBackend, RankWithoutPositions

_FEW = frozenset({"decode", "target-verify"})


@control()
class RankOfLocalIndices(RankBackend):
    """Keys are counted with the local indices of a rank (the parent of most faults of ranks)."""


@control()
class RankOfAKernelForDecode(RankWithoutPositions):
    """A kernel for decode gets only the local lengths and no positions, as in vLLM's DCP."""


@control()
class RankComputesItsSlots(RankBackend):
    """Slots of new rows are computed from positions, as in vLLM's ``compute_slot_mapping``; rows of others go to slot
    0."""

    capabilities = RankBackend.capabilities.with_changes(eager=_FEW, graph=_FEW)

    def own_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.where(batch.out_cache_loc <= 0, 0, self.table_slots(batch))


@control()
class RanksMergeInTurn(MergingRankBackend):
    """Each rank merges its result with that of the ranks after it, as in a reduction along a ring (the parent of faults
    of merged ranks)."""


@control("ranks-in-base-2-heads-first")
class RanksInBase2HeadsFirst(RankBackend):
    """Log-sum-exp of ranks in base 2, heads before rows, merged by the backend."""

    capabilities = RankBackend.capabilities.with_changes(
        eager=_FEW, graph=_FEW, lse=replace(MERGED_ON_RANKS, base="2", layout="[H, T]")
    )

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return (lse / math.log(2)).t()

    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().merge_state(out_a, lse_a.t(), out_b, lse_b.t())
        return out, lse.t()

    def weight(self, lse: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return torch.exp2(lse - top)

    def merged_lse(self, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return top + total.log2()
