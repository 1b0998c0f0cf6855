"""``triton`` as one of R ranks of decode context parallelism, with its kernels unchanged.

The kernel walks the keys of a whole request, and leaves out those of other ranks by their numbers. So a plan spreads
the request table of the rank: entry j of the new table is the slot of key j. A kernel that walks only the keys of its
rank needs no such table.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from ..contract import BackendContext, CrossAttention, ForwardBatch, ForwardMode, LogSumExp, Spans
from .triton import TritonBackend

_MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class TritonRanksBackend(TritonBackend):
    """Paged attention in Triton to the keys of a rank."""

    capabilities = TritonBackend.capabilities.with_changes(
        eager=_MODES,
        graph=_MODES,
        heads={"families": {"gqa"}, "head_dims": {64, 128}, "gqa_ratios": {3, 4}, "heads_by_layer": False},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {1, 16}, "kv_layouts": {"nhd"}, "kv_groups": False},
        bounds={"max_q_rows": 8, "max_topk": 2, "max_context_len": 1 << 13},
        options={"sinks": True},
        spans=Spans(),
        cross_attention=CrossAttention(),
        lse=LogSumExp(base="e", ranks=_MODES),
    )

    def __init__(self, context: BackendContext) -> None:
        self._of_rank = context.req_to_token
        spread = torch.zeros_like(context.req_to_token) if context.kv_splits else context.req_to_token
        super().__init__(replace(context, req_to_token=spread))

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Spread the request table, and plan an eager step."""
        self._spread()
        super().init_forward_metadata(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Spread the request table, which graphs read at the same address, and plan a capture or a replay."""
        self._spread()
        super().init_forward_metadata_out_graph(batch, in_capture)

    def _spread(self) -> None:
        """Write the slot of each key of a request to the entry of its number. Keys of other ranks get any slot."""
        if self.context.kv_splits:
            own, table = self.context.kv_splits[0], self.context.req_to_token
            index = own.index(torch.arange(table.shape[1], device=table.device))
            table.copy_(self._of_rank[:, index])
