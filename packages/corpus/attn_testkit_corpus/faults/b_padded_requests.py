"""Class B: padded requests with neither rows nor keys, for backends that declare support for them."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class OffsetsBackend(PlannedBackend):
    """Healthy parent: counts rows by ``query_start_loc``, in which padded requests have none."""

    capabilities = LEAN.with_changes(server={"padded_requests": {"nothing"}})

    @override
    def plan_counts(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.query_start_loc is not None
        return batch.query_start_loc[: batch.batch_size + 1].diff()


@fault(
    "general; query_start_loc of vLLM, whose tail is constant",
    "padding-inert replay-follows-batch",
    modes=_ALL,
    executions="graph",
)
class WidthOfTheLastRequest(OffsetsBackend):
    """The kernel takes the rows of a request from the last two offsets, and a padded request has none."""

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen = super().visible(meta, layer, position)
        return seen & (self.index[: seen.shape[1]] < meta.cu_seqlens_q.diff().flip(0)[:1])[None, :, None]


@fault(
    "general; flash-attention #1745 is of the kind",
    "padding-inert",
    modes=_ALL,
    executions="graph",
    modelled="NaN of 0 / 0 reaches live rows by a sum over requests",
)
class PaddedRequestsDivideByTheirRows(OffsetsBackend):
    """Keys per row are balanced over requests, and a padded request divides 0 by 0."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        assert self.metadata is not None
        rows = self.metadata.cu_seqlens_q.diff().float()
        balance = (rows / rows).mean()
        return super().combine(acc, lse, layer) * balance
