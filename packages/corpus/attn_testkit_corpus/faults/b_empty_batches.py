"""Class B: steps without a live request, as on a data-parallel rank without work."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
LEAN = PlannedBackend.capabilities.with_changes(
    families={"gqa"}, dtypes={"bf16"}, head_dims={64}, kv_dtypes={"same"}, logit_cap=False, sinks=False
)
"""Capabilities with few values in fields that do not matter here."""


@fault(
    slug="idle-rank-has-no-longest",
    source="general; idle ranks of data parallelism (sglang)",
    modes=_ALL,
    executions=("graph",),
    checks=("completes",),
    hint="no live request",
    modelled="the host takes the maximum of an empty list",
)
class IdleRankHasNoLongest(PlannedBackend):
    """The plan of a replay looks for the longest live request, and an idle rank has none."""

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        self.last_row = max(range(batch.out_cache_loc.shape[0]))


@fault(
    slug="idle-replay-keeps-the-last-plan",
    source="general; dummy batches of idle ranks (vLLM)",
    modes=_ALL,
    executions=("graph",),
    checks=("writes-own-kv",),
    hint="no live request",
)
class IdleReplayKeepsTheLastPlan(PlannedBackend):
    """A batch without live requests is not planned, and the graph writes to the rows of the batch before again."""

    capabilities = LEAN

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        if self.capturing or batch.out_cache_loc.shape[0]:
            super().fill(views, plan, batch)


@fault(
    slug="lengths-kept-across-an-idle-replay",
    source="general",
    modes=_ALL,
    executions=("graph",),
    checks=("buckets-independent", "replay-follows-batch", "padding-inert", "matches-oracle"),
    hint="",
)
class LengthsKeptAcrossAnIdleReplay(PlannedBackend):
    """The replay after one without a live request keeps that one's lengths."""

    capabilities = LEAN
    idle = False

    @override
    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        was_idle, self.idle = self.idle, not self.capturing and not batch.out_cache_loc.shape[0]
        self.keep = was_idle and not self.idle
        super().fill(views, plan, batch)

    @override
    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "kv_lens" or not self.keep:
            super().copy_in(name, target, source)


@fault(
    slug="idle-metadata-for-wrong-mode",
    source="sglang #31705",
    modes=_ALL,
    executions=("eager",),
    checks=("completes",),
    hint="takes_empty_batches",
    modelled="an eager batch without requests represents the dummy batch of an idle rank",
)
class IdleMetadataForWrongMode(PlannedBackend):
    """The plan takes a batch without requests for idle and makes no slots; the forward goes by the mode and needs
    some."""

    capabilities = LEAN.with_changes(server={"takes_empty_batches": True})
    planned = True

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.planned = batch.batch_size > 0
        super().init_forward_metadata(batch)

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        assert self.planned or self.in_graph, "slots are planned for every mode that stores"
        super().write_kv(layer, k, v, meta)


@fault(
    slug="empty-batch-divides-by-requests",
    source="general; rows // batch_size",
    modes=_ALL,
    executions=("eager",),
    checks=("completes",),
    hint="takes_empty_batches",
)
class EmptyBatchDividesByRequests(PlannedBackend):
    """Rows per request are counted by a division by the requests, although empty batches are declared."""

    capabilities = LEAN.with_changes(server={"takes_empty_batches": True})

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.rows = batch.input_ids.shape[0] // batch.batch_size
        return super().plan(batch)


@fault(
    slug="empty-batch-returns-a-row",
    source="general; at least one row, so that a kernel can be launched",
    modes=_ALL,
    executions=("eager",),
    checks=("output-contract",),
    hint="",
)
class EmptyBatchReturnsARow(PlannedBackend):
    """A kernel of one row is launched for an empty batch, and its row is returned."""

    capabilities = LEAN.with_changes(server={"takes_empty_batches": True})

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
        if not batch.batch_size:
            return q.new_zeros(1, layer.tp_q_head_num, layer.v_head_dim)
        return super().forward(q, k, v, layer, batch, save_kv_cache)
