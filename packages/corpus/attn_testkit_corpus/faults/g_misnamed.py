"""Class G: wrong results that an earlier hint misnamed: accumulators, sinks of another head, lost prefixes."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .dense import DenseBackend

_TILE = 16


@fault("general (an accumulator in the model's dtype)", "matches-oracle", "probably precision")
class AccumulatorInBf16(DenseBackend):
    """Products of weights and values are summed in bfloat16, tile by tile."""

    capabilities = DenseBackend.capabilities.with_changes(
        precision={"dtypes": {"fp16", "fp32"}}, kv_pool={"kv_dtypes": {"same"}}
    )

    def weighted_sum(self, p: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        values = values.masked_fill(~seen.any(1)[:, :, None, None], 0.0)
        total = None
        for each, rows in zip(torch.split(p, _TILE, -1), torch.split(values, _TILE, 1), strict=True):
            part = torch.einsum("bhgws,bshd->bwhgd", each, rows)
            total = (part if total is None else total + part).to(torch.bfloat16).float()
        assert total is not None
        return total


@fault(
    "general (sinks that are indexed from the wrong head)", "matches-oracle", "sink of (another head|head 1 in head 0)"
)
class SinksOfTheNextHead(DenseBackend):
    """A head uses the sink of the head after it."""

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        sinks = layer.sinks
        return super().weights(logits, seen, layer if sinks is None else replace(layer, sinks=sinks.roll(-1)))


@fault(
    "general (a window of 0 instead of the layer's own)",
    "matches-oracle",
    "a window of 0",
    modes="decode",
)
class WindowOfZero(DenseBackend):
    """A layer with a window attends to the row's own position only."""

    capabilities = DenseBackend.capabilities.with_changes(options={"sinks": False})

    def window_start(self, layer: AttentionLayer) -> torch.Tensor:
        return self.position


@fault(
    "general (rows of the request table by place in the batch, and NaN treated as an empty row)",
    "matches-oracle reads-own-kv finite",
    "the request row",
    modes="decode extend draft-extend draft-extend-v2",
)
class TableRowAfterItsOwnAndNanAsZero(DenseBackend):
    """A request reads the next row of the request table, and a NaN result is returned as zeros."""

    capabilities = DenseBackend.capabilities.with_changes(heads={"families": {"gqa"}, "gqa_ratios": {4}})

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        table = self.context.req_to_token
        rows = (batch.req_pool_indices[: batch.batch_size].long() + 1) % len(table)
        return table[rows].long().clamp(0, self.context.kv_pool.num_slots - 1)

    def weighted_sum(self, p: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        out = super().weighted_sum(p, values, seen)
        return out.masked_fill(out.isnan().any(-1, keepdim=True), 0.0)


@fault(
    "general (a row of the request table that a capture shifts, and NaN treated as an empty row)",
    "replay-follows-batch matches-oracle reads-own-kv finite",
    "the request row",
    modes="decode",
    executions="graph",
)
class CapturedTableRowAfterItsOwn(TableRowAfterItsOwnAndNanAsZero):
    """A request in a graph reads the next row of the request table, and a NaN result is returned as zeros."""

    capabilities = DenseBackend.capabilities.with_changes(heads={"families": {"gqa"}, "gqa_ratios": {4}})

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            return super().key_slots(batch)
        return DenseBackend.key_slots(self, batch)
