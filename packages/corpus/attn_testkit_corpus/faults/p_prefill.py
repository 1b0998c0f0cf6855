"""Class P: prefill: cached prefixes, and chunks whose prefix is the previous chunk."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .builds import RegisterRowsBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_EXTEND = (ForwardMode.EXTEND,)
_EAGER, _GRAPH = ("eager",), ("graph",)
LEAN = PlannedBackend.capabilities.with_changes(
    eager=_EXTEND,
    graph=_EXTEND,
    windows=_EXTEND,
    bounds={"max_topk": 0},
    heads={"families": {"gqa", "mqa"}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
)
"""Capabilities with few values in fields that do not matter for a prefill."""


@fault("general", "matches-oracle", "expected 0", modes="extend")
class PrefixOfPartOfAPageIgnored(PlannedBackend):
    """A prefix cache keeps whole pages, so a prefix shorter than a page counts as no prefix, and its keys are
    hidden."""

    capabilities = LEAN.with_changes(kv_pool={"page_sizes": {16, 64}})

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen, prefix = super().visible(meta, layer, position), (meta.kv_lens - meta.cu_seqlens_q.diff())[:, None]
        ignored = (prefix < self.context.page_size) & (self.index[: seen.shape[-1]] < prefix)
        return seen & ~ignored[:, None]


@fault("general", "matches-oracle", "expected 0", modes="extend")
class NoPrefixPathForTheWholeBatch(PlannedBackend):
    """One request without a prefix sends the whole batch to the kernel that attends only to new tokens."""

    capabilities = LEAN

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen, rows = super().visible(meta, layer, position), meta.cu_seqlens_q.diff()
        prefix = (meta.kv_lens - rows)[:, None]
        new_only = ((prefix[:, 0] == 0) & (rows > 0)).any()
        return seen & ~(new_only & (self.index[: seen.shape[-1]] < prefix))[:, None]


@fault("general", "matches-oracle", "start of the keys|causal|expected 0", modes="extend")
class ChunkCausalFromTheStartOfTheKeys(PlannedBackend):
    """Row j of a prompt sees keys 0 .. j, which is right without a prefix, but too few in every chunk after the
    first."""

    capabilities = LEAN

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        seen = super().visible(meta, layer, position)
        offset = self.index[: meta.max_q_len, None]
        return seen & (self.index[: seen.shape[-1]] <= offset)


@fault("general", "steps-independent", "earlier step", modes="extend", executions="eager")
class PrefixOfTheFirstChunkKept(PlannedBackend):
    """A request's prefix is looked up when it is first seen, and its later chunks are planned with the same one."""

    capabilities = LEAN.with_changes(server={"eager_without_waits": False})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.first: dict[tuple[int, int], int] = {}

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super().plan_lengths(batch, counts)
        if self.in_graph:
            return lens
        # Known again by the row of the table and its first slot.
        rows = batch.req_pool_indices.tolist()
        keys = [(row, int(self.context.req_to_token[row, 0])) for row in rows]
        now = (lens - counts).tolist()
        kept = [self.first.setdefault(key, prefix) for key, prefix in zip(keys, now, strict=True)]
        return torch.tensor(kept, dtype=torch.int32, device=lens.device) + counts


@fault("sglang #27316", "steps-independent", "earlier step", modes="extend", executions="eager")
class WrapperSwallowsChunkPlan(PlannedBackend):
    """A wrapper does not pass the chunk's plan on; the plan before it is used again wherever the sizes agree."""

    capabilities = LEAN

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        before = self.metadata
        super().init_forward_metadata(batch)
        assert self.metadata is not None
        if before is None or self.in_graph or len(before.kv_lens) != batch.batch_size:
            return
        if len(before.slots) == len(self.metadata.slots):
            self.metadata = replace(before, slots=self.metadata.slots)


@fault("general", "reads-own-kv finite", "zeros instead of NaN", modes="extend")
class PromptAttendedBeforeItIsStored(RegisterRowsBackend):
    """Keys and values are written after the attention, which reads the pool before they are stored."""

    capabilities = LEAN

    def registers(self, k: torch.Tensor, v: torch.Tensor, store: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None


@fault("general", "writes-own-kv", "row of the new token", modes="extend", modelled="one row of a request")
class NewRowsStoredOverThePrefix(PlannedBackend):
    """New rows are stored from the first slot of the request's table on, over a prefix that others share."""

    capabilities = LEAN

    def plan_slots(self, batch: ForwardBatch) -> torch.Tensor:
        slots = super().plan_slots(batch).clone()
        assert batch.extend_start_loc is not None
        assert batch.extend_prefix_lens is not None
        first = self.context.req_to_token[batch.req_pool_indices[: batch.batch_size].long(), 0].long()
        at = batch.extend_start_loc.long().clamp(max=len(slots) - 1)
        shared = (batch.extend_prefix_lens >= self.context.page_size) & (self.plan_counts(batch) > 0)
        return slots.index_copy(0, at, torch.where(shared, first, slots[at]))


@fault(
    "general",
    "replay-follows-batch",
    "only the graph is wrong|value from capture time",
    modes="extend",
    executions="graph",
)
class PrefixLengthsOfTheCapture(PlannedBackend):
    """The captured launch takes prefixes from the host's list, which at capture are all 0."""

    capabilities = LEAN

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return counts if self.in_graph else super().plan_lengths(batch, counts)


@fault("general", "matches-oracle", "window|expected", modes="extend")
class WindowRestartsAtAChunk(PlannedBackend):
    """The window is counted from a row's place in the chunk, so no key of the prefix is ever outside it."""

    capabilities = LEAN

    def window_start(self, position: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self.index[: position.shape[1]].expand_as(position) - layer.sliding_window_size
