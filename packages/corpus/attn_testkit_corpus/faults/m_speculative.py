"""Class M: rows, positions and slots of requests and draft nodes."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, DraftExtendInput, ForwardBatch, ForwardMode

from .catalogue import fault
from .dense import DenseBackend, Visibility

_VERIFY = (ForwardMode.TARGET_VERIFY,)
_V1 = (ForwardMode.DRAFT_EXTEND,)
_V2 = (ForwardMode.DRAFT_EXTEND_V2,)


@fault(
    slug="v1-rows-at-uniform-stride",
    source="sglang #26019 (review)",
    modes=_V1,
    checks=("matches-oracle",),
    hint="running sum|packed|request 0 is right",
)
class V1RowsAtUniformStride(DenseBackend):
    """Request i's rows are read at i * (S + 1), although accepted rows are packed."""

    @override
    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(counts), device=counts.device) * (self.context.speculative_num_steps + 1)


@fault(
    slug="v1-counts-without-the-bonus-token",
    source="general",
    modes=_V1,
    checks=("matches-oracle",),
    hint="request|row",
)
class V1CountsWithoutBonus(DenseBackend):
    """Rows of a request are num_correct_drafts, which leaves the bonus token out, not num_accept_tokens."""

    @override
    def rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        width, counts = super().rows_of_requests(batch)
        return width, batch.spec_info.num_correct_drafts[: len(counts)].long().clamp(min=1)


@fault(
    slug="v1-prefix-from-the-full-width",
    source="general",
    modes=_V1,
    checks=("matches-oracle", "finite"),
    hint="missing|shifted",
)
class V1PrefixFromFullWidth(DenseBackend):
    """The prefix is taken as seq_lens - (S + 1) for any accepted count, so the causal bound is shifted."""

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        return super().visibility(batch, torch.full_like(counts, len(offset)), offset)


@fault(
    slug="v1-length-at-full-width",
    source="general",
    modes=_V1,
    checks=("reads-own-kv", "matches-oracle"),
    hint="behind|stale|unowned|others",
)
class V1LengthAtFullWidth(DenseBackend):
    """Keys are prefix + S + 1 for every request, rejected tokens included."""

    @override
    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super().kv_lengths(batch, counts) - counts + self.context.speculative_num_steps + 1


@fault(
    slug="v2-rows-counted-by-accepted",
    source="sglang #21987",
    modes=_V2,
    checks=("matches-oracle", "padding-inert", "replay-follows-batch"),
    hint="request|row",
)
class V2RowsCountedByAccepted(DenseBackend):
    """V2 has N rows per request, accepted or not, and they are taken for packed accepted ones."""

    @override
    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return self.accepted.cumsum(0) - self.accepted

    @override
    def rows_of_requests(self, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
        assert isinstance(batch.spec_info, DraftExtendInput)
        self.accepted = batch.spec_info.num_accept_tokens[: batch.batch_size].long()
        return super().rows_of_requests(batch)


@fault(
    slug="v2-causal-over-accepted-rows",
    source="general",
    modes=_V2,
    checks=("matches-oracle", "reads-own-kv"),
    hint="visible|shifted|read",
)
class V2CausalOverAcceptedRows(DenseBackend):
    """The causal bound of v2 is aligned to the last accepted row, not to the last row."""

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        assert isinstance(batch.spec_info, DraftExtendInput)
        accepted = batch.spec_info.num_accept_tokens[: len(counts)].long()
        position, key, _ = super().visibility(batch, counts, offset)
        moved = position + (counts - accepted)[:, None]
        return moved, key, (key <= moved[..., None]) & (key < self.kv_lens[:, None, None])


@fault(
    slug="verify-length-taken-for-total",
    source="general",
    modes=_VERIFY,
    checks=("matches-oracle",),
    hint="KV token",
)
class VerifyLengthTakenForTotal(DenseBackend):
    """seq_lens of verify is taken for prefix + N, so the draft block lies over the end of the prefix."""

    @override
    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return batch.seq_lens[: batch.batch_size]


@fault(
    slug="verify-length-from-depth",
    source="general",
    modes=_VERIFY,
    checks=("matches-oracle",),
    hint="draft nodes",
)
class VerifyLengthFromDepth(DenseBackend):
    """The number of keys is the largest position + 1, which counts a tree's depth and not its nodes."""

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key, visible = super().visibility(batch, counts, offset)
        return position, key, visible & (self.key <= position.amax(1)[:, None, None])


@fault(
    slug="siblings-share-a-slot",
    source="sglang #15360, #26866",
    modes=_VERIFY,
    checks=("writes-own-kv",),
    hint="it holds the row of the new token|not written",
    modelled="upstream accepted tokens of a tree are taken for a dense prefix when their KV is moved",
)
class SiblingsShareASlot(DenseBackend):
    """Draft K and V are stored by position, so siblings of a tree overwrite each other."""

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
        position = batch.positions[: batch.batch_size * len(self.slots[0])].view(batch.batch_size, -1)
        by_position = self.slots.gather(1, position).view(-1)
        # Padded rows stay in slot 0.
        batch = replace(batch, out_cache_loc=torch.where(batch.out_cache_loc == 0, 0, by_position))
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@fault(
    slug="tree-width-from-topk",
    source="sglang #27545",
    modes=_VERIFY,
    executions=("eager",),
    checks=("matches-oracle", "completes"),
    hint="row|request|tree",
)
class TreeWidthFromSteps(DenseBackend):
    """The number of rows per request is steps + 1, which is the tree's size only for chains."""

    @override
    def row_starts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(counts), device=counts.device) * (self.context.speculative_num_steps + 1)
