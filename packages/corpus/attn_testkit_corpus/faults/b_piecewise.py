"""Class B: eager attention between graphs. Rows that belong to no request follow q in the same memory, and the capture
runs attention on a prompt of no request.
"""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

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


@fault(
    "sglang #31198",
    "reads-own-kv matches-oracle steps-independent",
    "between graphs",
    modes="extend",
    executions="eager",
)
class PathOfTheFirstPromptsStays(PlannedBackend):
    """The first plan chooses a kernel for new rows only, if its prompts have no prefix, as at a capture. Later plans
    do not take that back.
    """

    capabilities = LEAN
    new_rows_only: bool | None = None

    def plan(self, batch: ForwardBatch) -> Metadata:
        if self.new_rows_only is None and batch.extend_prefix_lens_cpu is not None:
            self.new_rows_only = not any(batch.extend_prefix_lens_cpu)
        return super().plan(batch)

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen = super().visible(meta, layer, position)
        stored = self.index[: seen.shape[-1]] < (meta.kv_lens - meta.cu_seqlens_q.diff())[:, None, None]
        return seen & ~stored if self.new_rows_only else seen


@fault(
    "general (buffers for the requests of the first plan)",
    "reads-own-kv matches-oracle",
    "between graphs",
    modes="extend",
    executions="eager",
)
class TableOfTheFirstPrompts(PlannedBackend):
    """The page table has room for the requests of the first plan. Requests after these read its last row."""

    capabilities = LEAN
    room = 0

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        self.room = self.room or batch.batch_size
        table = super().plan_pages(batch)
        return table[self.index[: len(table)].clamp(max=self.room - 1)]
