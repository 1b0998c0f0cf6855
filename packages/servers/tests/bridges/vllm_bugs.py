"""Bugs of the kind that servers have had, put into what stands around vLLM's FlashAttention class.

    PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend vllm_bugs:ClonedLengths --mode decode

Each changes one object of the server's, and nothing of how it is driven. Importing this imports vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_testkit.contract import BackendContext, ForwardBatch
from attn_testkit_servers.bridges.vllm import backend_class

FlashAttention: Any = backend_class("flash_attn")
FlashMLA: Any = backend_class("flashmla")
TritonMLA: Any = backend_class("triton_mla")


class ClonedLengths(FlashAttention):
    """A capture keeps lengths of its own: replays attend as many keys as the dummy batch had."""

    def _build_for_capture(self, batch: ForwardBatch) -> dict[str, Any]:
        built = super()._build_for_capture(batch)
        return {name: replace(each, seq_lens=each.seq_lens.clone()) for name, each in built.items()}


class FreshBlockTable(FlashAttention):
    """A step makes new block tables where graphs go on reading the old ones."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if not in_capture:
            self.inputs.block_tables = [table.clone() for table in self.inputs.block_tables]
        super().init_forward_metadata_out_graph(batch, in_capture)


class StaleSlots(FlashAttention):
    """Rows behind the live ones keep the slots of the batch before, and store into them."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        before = self.inputs.slot_mappings.clone()
        super().init_forward_metadata_out_graph(batch, in_capture)
        if not in_capture:
            slots = self.inputs.slot_mappings
            slots.copy_(torch.where(slots < 0, before, slots))


class PrefixInVerify(FlashAttention):
    """Lengths of target-verify leave the draft's own tokens out."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.forward_mode.is_target_verify():
            rows = self.context.num_draft_tokens
            batch = replace(batch, seq_lens=batch.seq_lens - rows)
        super().init_forward_metadata(batch)


class CountsRequests(FlashAttention):
    """Capture sizes in requests, where vLLM counts tokens: FlashAttention 3 chooses splits for a graph of extend."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(replace(context, capture_tokens=context.capture_sizes))


class ShortWindow(FlashAttention):
    """A window of W keys where the model has W and the row's own."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        for layer in self.layers.values():
            left, right = layer.impl.sliding_window
            layer.impl.sliding_window = (left - (left > 0), right)


class ScheduleOfTheWarmUp(FlashMLA):
    """A capture uses the schedule that its warm-up has made: no graph makes it again for the lengths of its replay."""

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        pass


class RankOfGlobalLengths(TritonMLA):
    """A rank of decode context parallelism attends to as many keys as the request has on all ranks (vLLM #28990)."""

    def _build(self, step: Any) -> dict[str, Any]:
        self.inputs.buffers.dcp_local_seq_lens.copy_(self.inputs.buffers.seq_lens)
        built: dict[str, Any] = super()._build(step)
        return built


class RankWithoutInterleave(TritonMLA):
    """Lengths on a rank are those of ranks that get one token at a time (vLLM #30309)."""

    def _build(self, step: Any) -> dict[str, Any]:
        own, buffers = self.context, self.inputs.buffers
        if own.dcp_world_size > 1:
            buffers.dcp_local_seq_lens.copy_(
                (buffers.seq_lens - own.dcp_rank + own.dcp_world_size - 1) // own.dcp_world_size
            )
        built: dict[str, Any] = super()._build(step)
        return built


class UnmaskedRank(TritonMLA):
    """Nothing masks what the kernel leaves of a request that has no key on a rank (vLLM #55879)."""

    def forward_return_lse(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *save: Any, **named: Any) -> Any:
        named.pop("part")
        return self._attend(q, k, layer, batch, *save or (named.get("save_kv_cache", True),))
