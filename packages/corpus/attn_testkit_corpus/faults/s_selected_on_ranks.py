"""Class S: selected keys on ranks of decode context parallelism, whose selections name positions in the request."""

from __future__ import annotations

import torch

from attn_testkit.contract import KVSplit

from .catalogue import fault
from .sparse import SparseOnRanks

_CHECKS = "log-sum-exp reads-own-kv matches-oracle"


@fault(
    "sglang #39330, #36990; ATOM #1832",
    _CHECKS,
    r"rank \d used the selected position \d+ of request \d as a local index; the local one is \d+",
    modelled="upstream the positions are virtual slots, and the rank divides them",
)
class SelectedPositionIsLocalIndex(SparseOnRanks):
    """A rank looks up the selected keys that it has at their global positions."""

    def local(self, positions: torch.Tensor, own: KVSplit) -> torch.Tensor:
        return positions


@fault(
    "sglang #39330, #31821",
    _CHECKS,
)
class RankAttendsToAllSelected(SparseOnRanks):
    """A rank attends to all selected positions at their local indices, and so to keys that nobody selected."""

    def on_rank(self, selected: torch.Tensor, own: KVSplit) -> torch.Tensor:
        return selected >= 0
