"""Healthy controls of prefill context parallelism, in the forms of real servers."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .catalogue import control
from .with_row_ranks import GatheringRankBackend, RankOfAllModesBackend, RowRankBackend, StateRankParent


@control()
class RankOfPlannedBlocks(RowRankBackend):
    """The rows of a rank follow from lengths and blocks, as in SGLang's metadata of context parallelism (the parent of
    faults of dealt rows)."""


@control()
class RankOfGivenPositions(RowRankBackend):
    """The rows of a rank follow from ``positions``, whatever the order in which they are dealt."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.given = batch.positions
        super().init_forward_metadata_in_graph(batch)

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        before = self.kv_lens[:, None] - new
        return self.given[self.row] - before


@control()
class StateOfRanks(StateRankParent):
    """Each rank continues the state that the one before it left (the parent of faults of states on ranks)."""


@control()
class RankThatGathers(GatheringRankBackend):
    """Each rank gathers k and v with ``torch.distributed``, as classes of SGLang and vLLM do (the parent of faults of
    collectives)."""


@control()
class RankThatVerifies(RankOfAllModesBackend):
    """Each rank decodes and verifies all rows, as in SGLang and vLLM (the parent of faults of ranks in other modes)."""
