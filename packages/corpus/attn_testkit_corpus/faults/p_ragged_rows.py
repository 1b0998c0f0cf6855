"""Class P: prefill: places and tiles of ragged rows, and batches that mix prompts with rows that decode."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .p_prefill import LEAN
from .parent import Metadata, PlannedBackend


@fault("general; flashinfer #4059", "matches-oracle output-written", "stride|offset", modes="extend")
class RaggedRowsAtTheLongestOnesStride(PlannedBackend):
    """Results of request i are written at i times the longest request's rows, as in a padded batch."""

    capabilities = LEAN

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        row, rows = self.index[:tokens], meta.cu_seqlens_q.diff().amax().long().clamp(min=1)
        place = (row // rows).clamp(max=len(out) - 1) * meta.max_q_len + row % rows
        return out.flatten(0, 1)[place]


@fault("general", "matches-oracle", "row", modes="extend")
class FirstRowInPlaceOfTheLast(PlannedBackend):
    """The last row, which decides the next token, is filled from the request's first row."""

    capabilities = LEAN

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        found, row, ends = super().scatter(out, meta, tokens), self.index[:tokens], meta.cu_seqlens_q[1:].long()
        request = torch.searchsorted(ends, row, right=True).clamp(max=len(out) - 1)
        is_last = row == ends[request] - 1
        return found[torch.where(is_last, meta.cu_seqlens_q[request].long(), row)]


@fault(
    "general",
    "steps-independent replay-follows-batch buckets-independent",
    "earlier step|step before|capture",
    modes="extend",
)
class DecodeRowsOfAMixedBatchKeepAPrefix(PlannedBackend):
    """Rows with one new token are treated as decodes, whose lengths are kept from the batch before and advanced by
    1."""

    capabilities = LEAN
    kept: torch.Tensor | None = None

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens, before = super().plan_lengths(batch, counts), self.kept
        self.kept = lens.clone()
        if before is None or len(before) != len(lens):
            return lens
        return torch.where((counts == 1) & (lens > 1), torch.minimum(before + 1, lens), lens)


@fault(
    "general",
    "steps-independent replay-follows-batch buckets-independent",
    "earlier step|offset|packed|capture",
    modes="extend",
)
class QueryOffsetsOfTheBatchBefore(PlannedBackend):
    """Query offsets are recomputed if the number of rows changes, but not if only their distribution does."""

    capabilities = LEAN
    offsets: torch.Tensor | None = None
    rows = 0

    def plan_offsets(self, counts: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.extend_num_tokens or 0
        if self.offsets is None or rows != self.rows or len(self.offsets) != len(counts) + 1:
            self.rows, self.offsets = rows, super().plan_offsets(counts, batch)
        return self.offsets


@fault("general", "matches-oracle finite", "expected|last|own", modes="extend")
class ExtendOfOneTokenAsADecode(PlannedBackend):
    """A batch of one row per request goes to the decode kernel, with lengths that lack the new token."""

    capabilities = LEAN

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super().plan_lengths(batch, counts)
        return lens - (counts <= 1).all().to(torch.int32)


@fault("general", "matches-oracle", "row|expected", modes="extend")
class ShortExtendBesidePromptsAsADecode(PlannedBackend):
    """Requests of up to 4 rows are moved to the decode kernel, which has no causal mask, so all rows see all keys."""

    capabilities = LEAN

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        short = (meta.cu_seqlens_q.diff() <= 4)[:, None]
        last = (meta.kv_lens - 1).long()[:, None].expand_as(position)
        return super().visible(meta, layer, torch.where(short, last, position))


@fault("general", "matches-oracle output-written", "offset|row", modes="extend")
class DecodeRowsTakenToComeFirst(PlannedBackend):
    """Offsets are made for a batch sorted with decodes first, but the batch keeps its order."""

    capabilities = LEAN

    def plan_offsets(self, counts: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        sorted_counts = counts[torch.argsort((counts > 1).to(torch.int32), stable=True)]
        live = (counts > 0).all()
        return super().plan_offsets(torch.where(live, sorted_counts, counts), batch)


@fault("general", "matches-oracle output-written", "a row that nothing computes|rows from", modes="extend")
class PromptRowsBehindTheTiles(PlannedBackend):
    """A request has four tiles of 16 rows, and rows after them are not computed: they keep zeros."""

    capabilities = LEAN

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out, row = super().attend(q, layer, meta), self.index[: len(q)]
        request = torch.searchsorted(meta.cu_seqlens_q[1:].long(), row, right=True).clamp(max=len(meta.kv_lens) - 1)
        behind = row - meta.cu_seqlens_q[request] >= 64
        return out.masked_fill(behind[:, None, None], 0.0)


@fault(
    "flashinfer #639, #641, #412, #291",
    "replay-follows-batch output-written",
    "only the graph is wrong|value from capture time",
    modes="extend",
    executions="graph",
)
class GridDependsOnQoContents(PlannedBackend):
    """The grid has the tiles of 16 rows of the captured requests, but a replay with another distribution of rows needs
    more."""

    capabilities = LEAN
    tiles = 0

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            assert batch.extend_seq_lens_cpu is not None
            self.tiles = sum(-(-rows // 16) for rows in batch.extend_seq_lens_cpu)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out, row = super().attend(q, layer, meta), self.index[: len(q)]
        if not self.in_graph:
            return out
        counts = meta.cu_seqlens_q.diff()
        request = torch.searchsorted(meta.cu_seqlens_q[1:].long(), row, right=True).clamp(max=len(meta.kv_lens) - 1)
        before = torch.nn.functional.pad(((counts + 15) // 16).cumsum(0), (1, 0))[request]
        tile = before + (row - meta.cu_seqlens_q[request]) // 16
        return out.masked_fill((tile >= self.tiles)[:, None, None], 0.0)
