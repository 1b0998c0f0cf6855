"""Class B: rows that belong to no request after the planned ones, for backends that declare support for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .e_non_causal import NON_CAUSAL, BlockBackend
from .parent import Metadata, PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)
_CAPABILITIES = LEAN.with_changes(server={"takes_more_rows": True})


class SlotsOfTheForward(PlannedBackend):
    """Healthy parent: a forward stores its rows in the slots of its batch, however many there are."""

    capabilities = _CAPABILITIES

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
        planned = self.metadata
        assert planned is not None
        self.metadata = replace(planned, slots=batch.out_cache_loc)
        try:
            return super().forward(q, k, v, layer, batch, save_kv_cache)
        finally:
            self.metadata = planned


@fault(
    "general; batches that are padded once they are planned (sglang)",
    "completes captures-cleanly",
    "takes_more_rows",
    modes=_ALL,
)
class SlotsOfThePlanForMoreRows(PlannedBackend):
    """Rows are stored in the slots of the plan, although there are more rows."""

    capabilities = _CAPABILITIES


@fault("general; q.shape[0] // batch_size", "matches-oracle replay-follows-batch", "takes_more_rows", modes=_UNIFORM)
class WidthOfMoreRows(SlotsOfTheForward):
    """The rows per request are q's rows divided by the number of requests, but q has more rows than planned."""

    def row_of(self, meta: Metadata, tokens: int) -> torch.Tensor:
        width = tokens // len(meta.kv_lens)
        first = self.index[: len(meta.kv_lens)] * width
        return (first[:, None] + self.index[: meta.max_q_len]).clamp(0, tokens - 1)


@fault("general; num_actual_tokens of vLLM, where no output is given", "output-contract", "takes_more_rows", modes=_ALL)
class MoreRowsAreCutOff(SlotsOfTheForward):
    """The output has only the rows of the plan, and the layers around attention continue with all rows."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        assert self.metadata is not None
        return super().attend(q, layer, meta)[: self.planned]

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.planned = batch.input_ids.shape[0]
        return super().plan(batch)


class MoreRowsOfBlocks(BlockBackend):
    """Healthy: rows after those of the plan get zeros, also in layers that are not causal."""

    capabilities = NON_CAUSAL.with_changes(server={"takes_more_rows": True})

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
        self.more = len(q) - len(self.place)
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        return torch.cat([out, out.new_zeros(self.more, *out.shape[1:])])


@fault(
    "general; a cu_seqlens_q that ends at num_input_tokens, which the causal mask forgives",
    "reads-own-kv matches-oracle",
    "takes_more_rows",
    modes="extend target-verify",
)
class LastRequestEndsWherePaddedRowsDo(MoreRowsOfBlocks):
    """The last request includes the rows after the plan, and as many more keys, which only a causal mask hides."""

    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        seen = super().in_window(layer).clone()
        if not layer.causal:
            seen[-1] = self.key < self.kv_lens[-1] + self.more
        return seen
