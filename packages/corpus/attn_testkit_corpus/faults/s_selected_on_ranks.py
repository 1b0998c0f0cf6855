"""Class S: selected keys on ranks of decode context parallelism, whose selections name positions in the request."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, KVSplit

from .catalogue import fault
from .indexer import IndexerOnRanks
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


@fault(
    "sglang #36990, #39330",
    "index-stored",
    "these are the tokens of other ranks",
    modes="decode target-verify draft-extend-v2 extend",
)
class RankStoresOnlyItsIndexKeys(IndexerOnRanks):
    """A rank stores the index keys of its own tokens, but each rank selects among the keys of all."""

    def index_slots(self, batch: ForwardBatch) -> torch.Tensor:
        return super().index_slots(batch).masked_fill(batch.out_cache_loc < 0, 0)


@fault(
    "general; a KV pool that is split, and an index pool that is not",
    "log-sum-exp matches-oracle reads-own-kv",
    modes="decode target-verify draft-extend-v2 extend",
)
class RankLooksIndexKeysUpInItsKVTable(IndexerOnRanks):
    """A rank looks index keys up in the request table of its KV pool, which has only the keys of the rank."""

    def index_table(self) -> torch.Tensor:
        return self.context.req_to_token
