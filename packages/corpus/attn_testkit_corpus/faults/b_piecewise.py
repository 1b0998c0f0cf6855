"""Class B: eager attention between graphs, where rows that belong to no request follow q in the same memory."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend


@fault(
    "general; sglang 0.5.23 (q beyond cu_seqlens_q[-1] in token buckets) is of the kind",
    "finite matches-oracle",
    "between graphs",
    modes="extend",
    executions="eager",
    modelled="the descriptor covers the storage of q; a real one is made for the memory that a graph allocated",
)
class ScaleOfAllRowsInMemory(PlannedBackend):
    """The scale of queries is computed from all rows in their memory, not only from those of the step."""

    capabilities = LEAN

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        room = (q.untyped_storage().nbytes() // q.itemsize - q.storage_offset() - q[0].numel()) // max(q.stride(0), 1)
        whole = q.as_strided((max(room + 1, len(q)), *q.shape[1:]), q.stride())
        scale = whole.float().abs().amax().clamp(min=1e-30)
        return super().attend((q.float() / scale * scale).to(q.dtype), layer, meta)
