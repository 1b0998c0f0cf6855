"""Class P: requests of an extend that have no row, between others that have some."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, ForwardMode

from .catalogue import fault
from .p_prefill import LEAN
from .parent import Metadata, PlannedBackend
from .states import StateParent

_EXTEND, _EAGER = (ForwardMode.EXTEND,), ("eager",)
_TAKES = {"takes_requests_without_rows": True}
_OF_ROWS = LEAN.with_changes(server=_TAKES)
_OF_STATES = StateParent.capabilities.with_changes(
    eager={"extend"}, graph=(), bounds={"max_topk": 0, "max_q_rows": 1}, server=_TAKES
)  # fmt: skip


@fault(
    "vllm-ascend #11807, #11438; flash-linear-attention counts segments that have chunks",
    "matches-oracle output-written reads-own-kv",
    modes="extend",
)
class RequestsNumberedWithoutEmptyOnes(PlannedBackend):
    """Work items are numbered by requests that have rows, and results are looked up by that number among all."""

    capabilities = _OF_ROWS

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        row, ends = self.index[:tokens], meta.cu_seqlens_q[1:].long()
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(out) - 1)
        offset = (row - meta.cu_seqlens_q[request]).clamp(0, meta.max_q_len - 1)
        number = ((meta.cu_seqlens_q.diff() > 0).cumsum(0) - 1)[request]
        return out.flatten(0, 1)[number * meta.max_q_len + offset]


@fault(
    "general; a binary search over cu_seqlens_q that ends early finds any of several equal offsets",
    "matches-oracle output-written reads-own-kv",
    modes="extend",
)
class SearchStopsAtAnEqualOffset(PlannedBackend):
    """The first row after an empty request is assigned to it, because both begin at the same offset."""

    capabilities = _OF_ROWS

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        row, first = self.index[:tokens], meta.cu_seqlens_q[:-1].long()
        left = torch.searchsorted(first, row).clamp(max=len(out) - 1)
        behind = (torch.searchsorted(first, row, right=True) - 1).clamp(0, len(out) - 1)
        request = torch.where(first[left] == row, left, behind)
        offset = (row - first[request]).clamp(0, meta.max_q_len - 1)
        return out.flatten(0, 1)[request * meta.max_q_len + offset]


@fault(
    "general; planners that share out a tile among the rows of a request",
    "completes",
    "division|modulo",
    modes="extend",
    executions="eager",
)
class TileDividedByTheRowsOfARequest(PlannedBackend):
    """The plan divides a tile of 64 by the number of rows of each request."""

    capabilities = _OF_ROWS.with_changes(graph=())

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.fits = [64 // rows for rows in batch.extend_seq_lens_cpu or ()]
        return super().plan(batch)


@fault(
    "vLLM #52500",
    "matches-oracle output-written reads-own-kv",
    modes="extend",
    executions="eager",
    modelled="upstream rows of an indexer, here of attention",
)
class FewRowsSharedEvenlyAmongAllRequests(PlannedBackend):
    """Up to 8 rows per nonempty request are treated as drafts, and divided by the number of all requests."""

    capabilities = _OF_ROWS.with_changes(graph=())
    width = 0

    def plan(self, batch: ForwardBatch) -> Metadata:
        news = [rows for rows in batch.extend_seq_lens_cpu or () if rows]
        even = len(set(news)) == 1 and news[0] <= 8
        self.width = max(1, sum(news) // batch.batch_size) if even else 0
        return super().plan(batch)

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        if not self.width:
            return super().scatter(out, meta, tokens)
        row = self.index[:tokens]
        request = (row // self.width).clamp(max=len(out) - 1)
        return out[request, (row % self.width).clamp(max=out.shape[1] - 1)]


@fault(
    "general; cu_seqlens[i + 1] - 1 of an empty request",
    "state-matches-oracle writes-own-state",
    modes="extend",
    executions="eager",
)
class LastRowOfAnEmptyRequestIsThatOfTheOneBefore(StateParent):
    """The state of a request is read after row cu_seqlens[i + 1] - 1, which belongs to another request if it has no
    row."""

    capabilities = _OF_STATES

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        place = torch.arange(len(rows), device=rows.device)
        before = torch.where(self.counts > 0, place, -1).cummax(0).values
        super().store(pool, rows[torch.where(before < 0, place, before)], index)


@fault(
    "vllm-ascend #11807",
    "matches-oracle output-written state-matches-oracle state-counts-tokens writes-own-state",
    modes="extend",
    executions="eager",
)
class LengthsByChunkNumberWithoutEmptyRequests(StateParent):
    """Chunks are numbered by requests that have rows, and lengths are looked up by that number among all requests."""

    capabilities = _OF_STATES

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        has = self.counts > 0
        number = (has.cumsum(0) - 1).clamp(min=0)
        self.counts = torch.where(has, self.counts[number], 0)
