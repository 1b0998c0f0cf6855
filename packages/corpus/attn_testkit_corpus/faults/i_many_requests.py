"""Class I: offsets and lengths of batches with more requests than a block or a tile of them."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .b_empty_batches import LEAN
from .catalogue import fault, helper
from .parent import Metadata, PlannedBackend

_BLOCK = 1024
_TILE = 16


@fault(
    "general; scans of kv_indptr and cu_seqlens_q in blocks of 1,024 requests",
    "reads-own-kv matches-oracle output-written",
    modes="decode extend",
)
class ScanRepeatsItsFirstBlock(PlannedBackend):
    """The second block of a scan of lengths and rows adds up the numbers of the first block again."""

    capabilities = LEAN

    @helper
    def repeated(self, counts: torch.Tensor) -> torch.Tensor:
        """``counts`` [B], with those of later blocks replaced by those of the first."""
        return counts if len(counts) <= _BLOCK else counts[torch.arange(len(counts), device=counts.device) % _BLOCK]

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super().plan_lengths(batch, counts)
        return self.repeated(lens) if batch.forward_mode.is_decode() else lens

    def plan_offsets(self, counts: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().plan_offsets(self.repeated(counts), batch)


@fault(
    "general; programs that take a tile of requests and read lengths of requests after the last one",
    "output-written matches-oracle",
    modes="extend",
    modelled="programs of requests that are not there clear their rows; -1 after the lengths ended their loop",
)
class TileBehindTheLastRequestWrites(PlannedBackend):
    """A program processes a tile of requests, and for those after the last one it reads row counts past the end."""

    capabilities = LEAN

    def plan_counts(self, batch: ForwardBatch) -> torch.Tensor:
        starts, counts = batch.extend_start_loc, batch.extend_seq_lens
        assert starts is not None
        assert counts is not None
        room = min(each.untyped_storage().nbytes() // 4 - each.storage_offset() for each in (starts, counts))
        bs = batch.batch_size
        tile = min(-(-bs // _TILE) * _TILE, room)
        self.first, self.count = (each.as_strided((tile,), (1,))[bs:].long() for each in (starts, counts))
        return super().plan_counts(batch)

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        row = self.index[:tokens, None]
        of_none = ((row >= self.first) & (row < self.first + self.count)).any(1)
        return super().scatter(out, meta, tokens).masked_fill(of_none[:, None, None], 0.0)
