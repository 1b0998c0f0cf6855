"""A healthy parent that is one of R ranks with a KV pool of its own, for bugs of decode context parallelism.

It counts keys as kernels do: with local indices 0, 1, 2, ... of the keys that its rank has, whose slots are in the
request table of the rank. Masks and windows follow the global numbers of these keys. Shapes as in ``dense.py``, but the
C columns are keys of the rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, KVSplit, LogSumExp, Windows

from .with_kv_splits import MODES, SplitKVBackend

NATURAL_ON_RANKS = LogSumExp(base="e", ranks=MODES)
MERGED_ON_RANKS = replace(NATURAL_ON_RANKS, merges=True)


class RankBackend(SplitKVBackend):
    """Healthy parent: all rows of a request against all of its keys on the rank."""

    capabilities = SplitKVBackend.capabilities.with_changes(lse=NATURAL_ON_RANKS)

    index: torch.Tensor
    """[C] int64: local index of each key of the rank: 0, 1, 2, ..."""
    local_lens: torch.Tensor
    """[B] int64: keys of each request on the rank, those of the step included."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.index = self.key
        if context.kv_splits:
            self.key = self.key_numbers(context.kv_splits[0])

    def key_numbers(self, own: KVSplit) -> torch.Tensor:
        """[C] int64: number, in its request, of each key of the rank."""
        return own.key(self.index, torch.zeros_like(self.index))

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute the keys of each request on the rank, and then what is the same without ranks."""
        if self.context.kv_splits:
            self.local_lens = self.keys_on_rank(batch)
        super().init_forward_metadata_in_graph(batch)

    def keys_on_rank(self, batch: ForwardBatch) -> torch.Tensor:
        """``local_lens``."""
        assert batch.dcp_local_seq_lens is not None
        return batch.dcp_local_seq_lens[: batch.batch_size].long()

    def all_keys(self, batch: ForwardBatch) -> torch.Tensor:
        """[B] int64: keys of each request on all ranks, those of the step included."""
        _, counts = self.rows_of_requests(batch)
        return self.kv_lengths(batch, counts)

    @override
    def held(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        """[B, C] bool: True for the keys of a request on the rank."""
        return self.index < self.local_lens[:, None]

    @override
    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        part: KVSplit,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the rows of the rank, then attend to its keys."""
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, self.own_slots(batch), k, v)
        return super().forward_return_lse(q, k, v, layer, batch, False, part=part)

    def own_slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[T] int64: slot in which the rank stores each row; slot 0 for rows of other ranks."""
        return batch.out_cache_loc.clamp(min=0)

    def table_slots(self, batch: ForwardBatch, *, at_key: bool = False, interleave: int = 0) -> torch.Tensor:
        """[T] int64: slot of each row by the request table of the rank, whichever rank the row belongs to.

        ``at_key``: the table is read at the number of the key instead of its local index. ``interleave``: the local
        index follows from it; 0: from that of the rank.
        """
        own = self.context.kv_splits[0]
        row = torch.arange(len(batch.out_cache_loc), device=self.index.device)
        request = (torch.searchsorted(self.starts, row, right=True) - 1).clamp(0, batch.batch_size - 1)
        key = (self.kv_lens - self.counts)[request] + row - self.starts[request]
        column = key if at_key else replace(own, interleave=interleave or own.interleave).index(key)
        rows = batch.req_pool_indices[: batch.batch_size].long()[request]
        return self.context.req_to_token[rows, column.clamp(0, len(self.index) - 1)].long()


class MergingRankBackend(RankBackend):
    """Healthy, and merges partial results of ranks."""

    capabilities = RankBackend.capabilities.with_changes(lse=MERGED_ON_RANKS)


class RankWithoutPositions(RankBackend):
    """Healthy in decode, and parent of bugs in lengths there: a kernel for decode attends to the first keys of a table,
    as many as a length says, and compares no positions. In other modes a row sees keys after it."""

    capabilities = RankBackend.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, windows=Windows(), lse=LogSumExp(base="e", ranks={ForwardMode.DECODE})
    )

    @override
    def key_numbers(self, own: KVSplit) -> torch.Tensor:
        """[C] int64: local indices, which are never larger than the position of a row that decodes."""
        return self.index
