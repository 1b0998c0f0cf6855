"""Class M: rows, positions and slots of requests and draft nodes."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, DraftExtendInput, ForwardBatch

from .catalogue import fault
from .dense import DenseBackend, Visibility


@fault("sglang #26019 (review)", "matches-oracle", "running sum|packed|request 0 is right", modes="draft-extend")
class V1RowsAtUniformStride(DenseBackend):
    """Request i's rows are read at i * (S + 1), although accepted rows are packed."""

    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(counts), device=counts.device) * (self.context.speculative_num_steps + 1)


@fault("general", "matches-oracle", "request|row", modes="draft-extend", slug="v1-counts-without-the-bonus-token")
class V1CountsWithoutBonus(DenseBackend):
    """Rows of a request are num_correct_drafts, which leaves the bonus token out, not num_accept_tokens."""

    def rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        width, counts = super().rows_of_requests(batch)
        return width, batch.spec_info.num_correct_drafts[: len(counts)].long().clamp(min=1)


@fault(
    "general", "matches-oracle finite", "missing|shifted", modes="draft-extend", slug="v1-prefix-from-the-full-width"
)
class V1PrefixFromFullWidth(DenseBackend):
    """The prefix is taken as seq_lens - (S + 1) for any accepted count, so the causal bound is shifted."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        return super().visibility(batch, torch.full_like(counts, len(offset)), offset)


@fault("general", "reads-own-kv matches-oracle", "behind|stale|unowned|others", modes="draft-extend")
class V1LengthAtFullWidth(DenseBackend):
    """Keys are prefix + S + 1 for every request, rejected tokens included."""

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super().kv_lengths(batch, counts) - counts + self.context.speculative_num_steps + 1


@fault("sglang #21987", "matches-oracle padding-inert replay-follows-batch", "request|row", modes="draft-extend-v2")
class V2RowsCountedByAccepted(DenseBackend):
    """V2 has N rows per request, accepted or not, but they are read as packed accepted rows."""

    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return self.accepted.cumsum(0) - self.accepted

    def rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        self.accepted = batch.spec_info.num_accept_tokens[: batch.batch_size].long()
        return super().rows_of_requests(batch)


@fault("general", "matches-oracle reads-own-kv", "visible|shifted|read", modes="draft-extend-v2")
class V2CausalOverAcceptedRows(DenseBackend):
    """The causal bound of v2 is aligned to the last accepted row, not to the last row."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        assert isinstance(batch.spec_info, DraftExtendInput)
        accepted = batch.spec_info.num_accept_tokens[: len(counts)].long()
        position, key, _ = super().visibility(batch, counts, offset)
        moved = position + (counts - accepted)[:, None]
        return moved, key, (key <= moved[..., None]) & (key < self.kv_lens[:, None, None])


@fault("general", "matches-oracle", "KV token", modes="target-verify")
class VerifyLengthTakenForTotal(DenseBackend):
    """seq_lens of verify is read as prefix + N, so the draft block overlaps the end of the prefix."""

    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return batch.seq_lens[: batch.batch_size]


@fault("general", "matches-oracle", "draft nodes", modes="target-verify")
class VerifyLengthFromDepth(DenseBackend):
    """The number of keys is the largest position + 1, which counts a tree's depth and not its nodes."""

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        return position, key, visible & (self.key <= position.amax(1)[:, None, None])


@fault(
    "sglang #15360, #26866",
    "writes-own-kv",
    "it holds the row of the new token|not written",
    modes="target-verify",
    modelled="upstream accepted tokens of a tree are used as a dense prefix when their KV is moved",
)
class SiblingsShareASlot(DenseBackend):
    """Draft K and V are stored by position, so siblings of a tree overwrite each other."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        position = batch.positions[: batch.batch_size * len(self.slots[0])].view(batch.batch_size, -1)
        by_position = self.slots.gather(1, position).view(-1)
        # Padded rows stay in slot 0.
        batch = replace(batch, out_cache_loc=torch.where(batch.out_cache_loc == 0, 0, by_position))
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault(
    "sglang #27545",
    "matches-oracle completes",
    "row|request|tree",
    modes="target-verify",
    executions="eager",
    slug="tree-width-from-topk",
)
class TreeWidthFromSteps(DenseBackend):
    """The number of rows per request is steps + 1, which is the tree's size only for chains."""

    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(counts), device=counts.device) * (self.context.speculative_num_steps + 1)
