"""A backend whose graph was captured with one query stride and is replayed with another (sglang #21987).

Draft-extend v1 packs the accepted tokens of each request without gaps. Here the captured kernel reads rows in steps of
S + 1, as at capture, when every request had S + 1 rows; a replay passes packed offsets. The two agree only if every
request accepts everything, and a test that replays its capture batch tries only that.

Run it::

    attn-testkit run --backend attn_testkit.examples:PackedStrideBackend --mode draft-extend --device cpu
"""

from __future__ import annotations

import torch

from ..contract import ForwardBatch, KernelPlan
from .minimal import MinimalBackend


class PackedStrideBackend(MinimalBackend):
    """Right in eager, and right in a graph as long as every request accepts all tokens."""

    capabilities = MinimalBackend.capabilities.with_changes(
        eager={"draft-extend"}, graph={"draft-extend"}, bounds={"max_topk": 0}
    )
    _captured = False

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Remember that a capture follows, in which the kernel fixes its layout."""
        self._captured = in_capture

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare an eager step."""
        self._captured = False
        self.init_forward_metadata_in_graph(batch)

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots that each row sees. Under capture a fixed stride assigns rows to requests, while lengths come from
        packed offsets."""
        if not self._captured:
            return super().visible(q, plan)
        row = torch.arange(len(q), device=q.device)
        request, offset = row // plan.max_q_len, row % plan.max_q_len
        prefix = plan.kv_lens - plan.cu_seqlens_q.diff()
        slot = torch.arange(plan.page_table.shape[1] * plan.page_size, device=q.device)
        return request, slot <= (prefix[request] + offset)[:, None]
