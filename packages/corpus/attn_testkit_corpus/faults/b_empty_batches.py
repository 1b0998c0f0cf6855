"""Class B: steps without a live request, as on a data-parallel rank without work."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
LEAN = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
    kv_pool={"kv_dtypes": {"same"}},
    options={"logit_cap": False, "sinks": False},
)
"""Capabilities with few values in fields that do not matter for this file."""


@fault(
    "general; idle ranks of data parallelism (sglang)",
    "completes",
    "no live request",
    modes=_ALL,
    executions="graph",
    modelled="the host takes the maximum of an empty list",
)
class IdleRankHasNoLongest(PlannedBackend):
    """The plan of a replay needs the longest live request, but an idle rank has no request."""

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        super().fill(views, plan, batch)
        self.last_row = max(range(batch.out_cache_loc.shape[0]))


@fault(
    "general; dummy batches of idle ranks (vLLM)", "writes-own-kv", "no live request", modes=_ALL, executions="graph"
)
class IdleReplayKeepsTheLastPlan(PlannedBackend):
    """A batch without live requests is not planned, so the graph writes to the rows of the previous batch again."""

    capabilities = LEAN

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        if self.capturing or batch.out_cache_loc.shape[0]:
            super().fill(views, plan, batch)


@fault(
    "general", "buckets-independent replay-follows-batch padding-inert matches-oracle", modes=_ALL, executions="graph"
)
class LengthsKeptAcrossAnIdleReplay(PlannedBackend):
    """The replay after one without live requests keeps the lengths of that replay."""

    capabilities = LEAN
    idle = False

    def fill(self, views: Metadata, plan: Metadata, batch: ForwardBatch) -> None:
        was_idle, self.idle = self.idle, not self.capturing and not batch.out_cache_loc.shape[0]
        self.keep = was_idle and not self.idle
        super().fill(views, plan, batch)

    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if name != "kv_lens" or not self.keep:
            super().copy_in(name, target, source)


@fault(
    "sglang #31705",
    "completes",
    "takes_empty_batches",
    modes=_ALL,
    executions="eager",
    modelled="an eager batch without requests represents the dummy batch of an idle rank",
)
class IdleMetadataForWrongMode(PlannedBackend):
    """The plan treats a batch without requests as idle and makes no slots, but the forward decides by the mode and
    needs slots."""

    capabilities = LEAN.with_changes(server={"takes_empty_batches": True})
    planned = True

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.planned = batch.batch_size > 0
        super().init_forward_metadata(batch)

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        assert self.planned or self.in_graph, "slots are planned for every mode that stores"
        super().write_kv(layer, k, v, meta)


@fault("general; rows // batch_size", "completes", "takes_empty_batches", modes=_ALL, executions="eager")
class EmptyBatchDividesByRequests(PlannedBackend):
    """Rows per request are counted by a division by the requests, although empty batches are declared."""

    capabilities = LEAN.with_changes(server={"takes_empty_batches": True})

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.rows = batch.input_ids.shape[0] // batch.batch_size
        return super().plan(batch)


@fault("general; at least one row, so that a kernel can be launched", "output-contract", modes=_ALL, executions="eager")
class EmptyBatchReturnsARow(PlannedBackend):
    """A kernel of one row is launched for an empty batch, and its row is returned."""

    capabilities = LEAN.with_changes(server={"takes_empty_batches": True})

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
