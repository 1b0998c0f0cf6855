"""Healthy parents that are one of R ranks of prefill context parallelism, for bugs of rows that are dealt.

The numbers of a rank's rows follow from ``RowSplit`` and the lengths, as in servers that plan blocks, and not from
``batch.positions``. Shapes as in ``dense.py``; rows are those of the rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from typing_extensions import override

from attn_testkit.contract import (
    ROW_ORDERS,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    PrefillRanks,
    RowSplit,
    StateLayer,
    Windows,
)

from .dense import DenseBackend, Visibility
from .states import StateParent


class RowRankBackend(DenseBackend):
    """Healthy parent: the rows of a rank against all keys of their requests."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"extend"},
        graph=frozenset(),
        heads=HeadShapes(families={"gqa", "mla"}, head_dims={64}, mla_rope_dims={64}, gqa_ratios={4}),
        precision={"dtypes": {"bf16"}},
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={4, 16}),
        windows=Windows({ForwardMode.EXTEND}),
        prefill_ranks=PrefillRanks(frozenset(ROW_ORDERS)),
        server={"takes_requests_without_rows": True},
    )

    @property
    def split(self) -> RowSplit:
        """The rows of the rank; all rows for an instance that is not a rank."""
        return self.context.row_split or RowSplit("blocks", 0, 1)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Plan the rows of the rank, if it has any."""
        if len(batch.input_ids):
            super().init_forward_metadata_in_graph(batch)

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        """Positions and visibility of the rows of the rank, without windows."""
        prefix = self.prefix_lens(batch)
        position = prefix[:, None] + self.rows_in_prompt(offset[None], self.new_lens(batch)[:, None])
        key = self.key[None, None]
        held = (key < self.kv_lens[:, None, None]) & self.gathered(prefix, self.new_lens(batch))
        return position, key, (key <= position[..., None]) & held

    def prefix_lens(self, batch: ForwardBatch) -> torch.Tensor:
        """[B] int64: keys of each request before the step."""
        assert batch.extend_prefix_lens is not None
        return batch.extend_prefix_lens.long()

    def new_lens(self, batch: ForwardBatch) -> torch.Tensor:
        """[B] int64: new rows of each request on all ranks."""
        assert batch.extend_prefix_lens is not None
        return batch.seq_lens - batch.extend_prefix_lens.long()

    def rows_in_prompt(self, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """[B, W] int64: number, among the new rows of its request, of each row of the rank."""
        return self.split.row(index, new)

    def gathered(self, prefix: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Bool, as wide as [B, 1, C]: True for keys that the rank has."""
        return torch.ones(1, 1, len(self.key), dtype=torch.bool, device=self.key.device)

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Outputs of the rows of the rank, after k and v of all rows are stored."""
        if save_kv_cache:
            self.keep(k, v, layer, batch)
        if not len(q):
            return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim)
        return super().forward(q, k, v, layer, batch, False)

    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Store k and v [T, Hk, ...] of the rows of all ranks."""
        self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)


class StateRankParent(StateParent):
    """Healthy parent: continues the state that the rank before it left."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"extend"}, graph=frozenset(), prefill_ranks=PrefillRanks({"blocks"}), bounds={"max_topk": 1}
    )

    def is_later_rank(self) -> bool:
        """True if another rank runs before this one."""
        return self.context.pcp_rank > 0

    def empty(self) -> torch.Tensor:
        """[bs] bool: requests without a row on this rank."""
        return self.counts == 0

    def window_and_state(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Window and state that the slots of the requests hold now."""
        conv, temporal = self.pools(layer)
        return conv[self.index].clone(), temporal[self.index].clone()


class GatheringRankBackend(RowRankBackend):
    """Healthy parent: gathers k and v of the rows of all ranks itself."""

    capabilities = RowRankBackend.capabilities.with_changes(
        prefill_ranks=PrefillRanks(frozenset(ROW_ORDERS), gathers=True)
    )

    total: int
    """T: rows of all ranks."""
    order: torch.Tensor
    """[T] int64: place of each row of the batch among those that are gathered."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Gather the rows of all ranks, from which the order of k and v follows."""
        super().init_forward_metadata_in_graph(batch)
        self.total = len(batch.out_cache_loc)
        if batch.pcp_rows is not None:
            self.order = self.order_of(self.all_rows(batch.pcp_rows))

    def all_rows(self, own: torch.Tensor) -> torch.Tensor:
        """[R * T]: row of the batch of each place among those that are gathered; T where there is none."""
        return self.gather(own, self.total)

    def order_of(self, rows: torch.Tensor) -> torch.Tensor:
        """``order``, of ``all_rows``."""
        return torch.argsort(rows)[: self.total]

    def gather(self, own: torch.Tensor, filler: int) -> torch.Tensor:
        """[R * T, ...]: rows of each rank, filled up to T rows."""
        padded = own.new_full((self.total, *own.shape[1:]), filler)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.split.ranks)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)

    @override
    def keep(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        """Gather k and v [T_r, Hk, ...], and store them."""
        if batch.pcp_rows is not None:
            k, v = self.gathered_kv(k, v)
        super().keep(k, v, layer, batch)

    def gathered_kv(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the rows of all ranks, in the order of the batch."""
        of_k = self.gather(k, 0)[self.order]
        return of_k, self.gather(v, 0)[self.order]


class RankOfAllModesBackend(RowRankBackend):
    """Healthy parent: a rank that also decodes and verifies. Rows of these modes are not dealt."""

    capabilities = RowRankBackend.capabilities.with_changes(
        eager={"extend", "decode", "target-verify"}, graph={"decode", "target-verify"}
    )

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        """Visibility of the rank's rows of prompts, and of all rows of a decode or a verify."""
        parent = RowRankBackend if batch.forward_mode is ForwardMode.EXTEND else DenseBackend
        return parent.visibility(self, batch, counts, offset)
