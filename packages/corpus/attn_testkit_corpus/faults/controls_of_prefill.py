"""Healthy controls of prefill: the ways in which servers split a batch, a prefix or a prompt."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .builds import RegisterRowsBackend
from .catalogue import control
from .p_prefill import LEAN
from .parent import Metadata, PlannedBackend


@control()
class ExtendRowByRow(PlannedBackend):
    """Each new token is a separate decode over all keys before it, as a decode kernel serves a short prefill."""

    capabilities = LEAN.with_changes(bounds={"max_extend_tokens": 40})

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        row, ends = self.index[: len(q)], meta.cu_seqlens_q[1:].long()
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(meta.kv_lens) - 1)
        behind = ends[request] - row
        one_by_one = Metadata(
            page_table=meta.page_table[request],
            kv_lens=(meta.kv_lens[request] - behind + 1).clamp(min=0).to(torch.int32),
            cu_seqlens_q=self.index[: len(q) + 1].to(torch.int32),
            chunk=meta.chunk[request],
            slots=meta.slots,
            mask=None,
        )
        return super().attend(q, layer, one_by_one)

    def new_workspace(self, numbers: int) -> torch.Tensor:
        # Every row is a request here.
        return super().new_workspace(numbers * self.context.max_extend_tokens)


@control()
class PrefixAndNewRowsMerged(RegisterRowsBackend):
    """The prefix is one partial result, and the new rows, from k and v, are another; merged by log-sum-exp (sglang)."""

    capabilities = LEAN.with_changes(kv_pool={"kv_dtypes": {"same"}})

    def in_split(self, meta: Metadata) -> torch.Tensor:
        prefix = (meta.kv_lens - meta.cu_seqlens_q.diff())[:, None]
        split = (self.index[: self.pages * self.context.page_size] >= prefix).long()
        return split[:, None] == self.index[: self.max_splits, None]


@control()
class PrefixGatheredInChunks(PlannedBackend):
    """Keys are gathered in chunks of 48, and a request may have none in a later chunk (MLA prefill)."""

    capabilities = LEAN.with_changes(bounds={"max_context_len": 1 << 10})
    max_splits = 1 << 10
    keys_at_once = 48

    def __init__(self, context: BackendContext) -> None:
        self.max_splits = -(-context.max_context_len // self.keys_at_once) + 3
        super().__init__(context)

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return torch.full_like(lens, self.keys_at_once)


@control()
class DecodesSortedToTheFront(PlannedBackend):
    """Rows that decode are planned before the prompts, and every result is moved back to the place of its row
    (vLLM)."""

    capabilities = LEAN
    order: torch.Tensor

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.orders = torch.zeros(max_bs, dtype=torch.int64, device=self.context.device)

    def plan(self, batch: ForwardBatch) -> Metadata:
        meta = super().plan(batch)
        order = torch.argsort((meta.cu_seqlens_q.diff() > 1).to(torch.int32), stable=True)
        self.order = self.orders[: len(order)].copy_(order) if self.in_graph else order
        return meta

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        counts, order, row = meta.cu_seqlens_q.diff()[self.order], self.order, self.index[: len(q)]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        request = torch.searchsorted(offsets[1:].long(), row, right=True).clamp(max=len(order) - 1)
        # Row of the batch for each row in the new order; rows of no request stay where they are.
        came_from = meta.cu_seqlens_q[order[request]] + row - offsets[request]
        came_from = torch.where(row < offsets[-1], came_from.long(), row)
        by_kind = Metadata(meta.page_table[order], meta.kv_lens[order], offsets, meta.chunk[order], meta.slots, None,
                           meta.max_q_len)  # fmt: skip
        out = super().attend(q[came_from], layer, by_kind)
        return torch.empty_like(out).index_copy_(0, came_from, out)


@control()
class RequestsWithoutRowsLeftOut(PlannedBackend):
    """The plan of an extend leaves out requests without rows, with all their metadata (vLLM's Ascend plugin)."""

    capabilities = LEAN.with_changes(
        graph=(), server={"takes_requests_without_rows": True, "eager_without_waits": False}
    )

    def plan(self, batch: ForwardBatch) -> Metadata:
        whole, counts = super().plan(batch), batch.extend_seq_lens_cpu or ()
        device = self.context.device
        kept = torch.tensor([i for i, rows in enumerate(counts) if rows], dtype=torch.int64).to(device)
        return Metadata(
            page_table=whole.page_table[kept],
            kv_lens=whole.kv_lens[kept],
            cu_seqlens_q=torch.cat([whole.cu_seqlens_q[:1], whole.cu_seqlens_q[1:][kept]]),
            chunk=whole.chunk[kept],
            slots=whole.slots,
            mask=None,
            max_q_len=whole.max_q_len,
        )


@control()
class TableThatGrows(PlannedBackend):
    """The page table has room for the requests of the first plan, and is replaced for more of them."""

    capabilities = LEAN
    table: torch.Tensor | None = None

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        pages = super().plan_pages(batch)
        if self.table is None or len(self.table) < len(pages):
            self.table = torch.empty_like(pages)
        return self.table[: len(pages)].copy_(pages)
