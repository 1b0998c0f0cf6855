"""The parent of faults of indexers: a right backend that stores index keys and selects, with a hook for each step."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode, Indexer, KernelPlan, Sparse

from .sparse import SparseOnRanks, SparseParent

INDEX_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND)
_PAGE, _WIDTH, _LARGEST = 64, 128, 448.0
_ROWS = 64
"""Rows whose keys are gathered at once: hundreds of rows of thousands of keys would be gigabytes."""


class IndexerParent(SparseParent):
    """A right backend that gathers index keys by page, as a paged kernel does. It shares no line with adapters."""

    capabilities = SparseParent.capabilities.with_changes(
        eager=frozenset(INDEX_MODES),
        graph=frozenset(INDEX_MODES),
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4}, reuses_selections=True)),
    )

    def scales(self, rows: torch.Tensor) -> torch.Tensor:
        """[T] float32: scales of index keys ``rows`` [T, 128] float32."""
        return rows.abs().amax(-1).clamp(min=1e-4) / _LARGEST

    def pool_slots(self, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: slot of the index key of each row."""
        return plan.out_cache_loc.long()

    def key_plane(self, layer_id: int) -> torch.Tensor:
        """[pages, 64, 128] uint8, a view."""
        assert self.context.index_pool is not None
        buffer = self.context.index_pool.get_index_buffer(layer_id)
        return buffer[:, : _PAGE * _WIDTH].view(len(buffer), _PAGE, _WIDTH)

    def scale_plane(self, layer_id: int) -> torch.Tensor:
        """[pages, 64] float32, a view."""
        assert self.context.index_pool is not None
        return self.context.index_pool.get_index_buffer(layer_id)[:, _PAGE * _WIDTH :].view(torch.float32)

    @override
    def write_index(self, k_index: torch.Tensor, plan: KernelPlan) -> None:
        rows = k_index.float()
        scales, slots = self.scales(rows), self.pool_slots(plan)
        quantized = (rows / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        self.put(quantized, scales, slots // _PAGE, slots % _PAGE, plan.layer.layer_id)

    def put(
        self, keys: torch.Tensor, scales: torch.Tensor, page: torch.Tensor, place: torch.Tensor, layer_id: int
    ) -> None:
        """Store ``keys`` [T, 128] uint8 and ``scales`` [T] in their planes."""
        self.key_plane(layer_id)[page, place] = keys
        self.scale_plane(layer_id)[page, place] = scales

    def gathered(self, slots: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [..., 128] float32 and scales [...] of ``slots`` [...]."""
        page, place = slots // _PAGE, slots % _PAGE
        keys = self.key_plane(layer_id)[page, place].view(torch.float8_e4m3fn).float()
        return keys, self.scale_plane(layer_id)[page, place]

    def products(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[T, heads, n]: products of ``q`` [T, heads, 128] and ``keys`` [T, n, 128]."""
        return (q.float() @ keys.mT).relu()

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n]: scores of the n places of the request table; NaN where nothing is stored."""
        # No request has more keys than the pool has slots, in the longest context either.
        table = plan.slot_table[:, : self.context.kv_pool.num_slots]
        request, parts = self.request_of_row(q, plan), []
        for first in range(0, max(1, len(q)), _ROWS):
            few = slice(first, first + _ROWS)
            keys, scales = self.gathered(table[request[few]].long(), plan.layer.layer_id)
            parts.append(torch.einsum("thn,th->tn", self.products(q[few], keys), weights[few]) * scales)
        return torch.cat(parts)

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: keys from which each row selects."""
        return self.keys_seen(rows, plan)

    def best(self, scores: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
        """[T, topk] int64: places of the highest scores of the first ``lengths`` [T]; -1 in the rest."""
        place = torch.arange(scores.shape[1], device=scores.device)
        seen = torch.where(place < lengths[:, None], scores, -torch.inf)
        order = seen.sort(1, descending=True).indices[:, :topk]
        order = torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=scores.shape[1])
        return torch.where(order < lengths[:, None], order, -1)

    @override
    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        scores = self.scored(q_index, weights, plan)
        return self.best(scores, self.lengths(q_index, plan), plan.layer.topk).to(torch.int32)


class IndexerOfPrefixes(IndexerParent):
    """A right backend whose scores reach to the end of the request table, whatever ``max_context_len`` counts."""

    capabilities = IndexerParent.capabilities.with_changes(server={"context_len": {"all", "prefix"}})


class IndexerOnRanks(SparseOnRanks, IndexerParent):
    """A right backend as one of R ranks, each of which has the index keys of all tokens."""

    capabilities = SparseOnRanks.capabilities.with_changes(
        eager=frozenset(INDEX_MODES),
        graph=frozenset(INDEX_MODES),
        sparse={"topk": {16}, "indexer": Indexer(heads={4}, replicated=True)},
    )

    def index_slots(self, batch: ForwardBatch) -> torch.Tensor:
        """[T] int64: slot in the index pool of each row of a rank."""
        assert batch.index_cache_loc is not None
        return batch.index_cache_loc.clamp(min=0)

    def index_table(self) -> torch.Tensor:
        """[requests, n] int32: the request table of the index pool of a rank."""
        assert self.context.index_req_to_token is not None
        return self.context.index_req_to_token

    @override
    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        if self.context.index_req_to_token is not None and batch.batch_size:
            self.slots_of_step = self.index_slots(batch)
        super().store_index(k_index, layer, batch)

    @override
    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        if self.context.index_req_to_token is not None:
            self.table_of_step = self.index_table()[batch.req_pool_indices[: batch.batch_size].long()]
        return super().select(q_index, weights, layer, batch)

    @override
    def pool_slots(self, plan: KernelPlan) -> torch.Tensor:
        on_ranks = self.context.index_req_to_token is not None
        return self.slots_of_step if on_ranks else super().pool_slots(plan)

    @override
    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        if self.context.index_req_to_token is not None:
            plan = replace(plan, step=replace(plan.step, table=self.table_of_step))
        return super().scored(q, weights, plan)


class FusedIndexer(IndexerParent):
    """A right backend whose ``forward`` selects: it gets the inputs of the indexer, and no selection."""

    capabilities = IndexerParent.capabilities.with_changes(
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4}, fused=True))
    )

    @override
    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_index: torch.Tensor,
        index_weights: torch.Tensor,
        k_index: torch.Tensor,
    ) -> torch.Tensor:
        if save_kv_cache:
            self.store_index(k_index, layer, batch)
        selected = self.select(q_index, index_weights, layer, batch)
        return super().forward(q, k, v, layer, batch, save_kv_cache, selected=selected)
