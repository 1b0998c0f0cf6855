"""Class I, rows of wider buffers: request tables and spans whose rows are read as if nothing were between them."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .catalogue import fault
from .e_spans import SpanBackend
from .s_wider_buffers import as_contiguous


class TablesOfViews(SpanBackend):
    """The parent on request tables and spans that are columns of wider buffers."""

    capabilities = SpanBackend.capabilities.with_changes(server={"takes_column_views": True})


@fault(
    "sglang flashinfer_backend.py (req_to_token.shape[1] as the stride of its kernel of page indices)",
    "reads-own-kv output-written finite matches-oracle",
    modes="decode extend",
)
class StrideOfTheTableIsItsColumns(TablesOfViews):
    """A row of the request table is found by its number times the columns, and not by the stride of the tensor."""

    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        table = as_contiguous(self.context.req_to_token)
        return table[batch.req_pool_indices[: batch.batch_size].long()].long()


@fault("general (spans * 2 as the stride of a request)", "matches-oracle", modes="decode extend")
class StrideOfSpansIsTheirNumber(TablesOfViews):
    """The spans of a request are found by its number times the spans of a request, and not by the stride."""

    def ranges(self, batch: ForwardBatch) -> torch.Tensor:
        found = getattr(batch, "mm_prefix_range_tensor", None)
        return super().ranges(batch) if found is None else as_contiguous(found).long()
