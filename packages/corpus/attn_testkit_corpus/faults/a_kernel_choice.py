"""Class A: the kernel of a batch size, and metadata that are built a second time before its capture."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_SIZE = 12
_KEYS = 1000


@fault(
    "general; kernels of vLLM that are chosen by the sizes of its graphs", "matches-oracle", "passes with 11 requests"
)
class KernelSwitchOffByOne(PlannedBackend):
    """Batches of more than 12 requests are planned without splits, but batches of 12 and more run on the kernel without
    splits."""

    capabilities = PlannedBackend.capabilities.with_changes(
        bounds={"kernel_changes_at": {_SIZE}},
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}},
        options={"logit_cap": False, "sinks": False},
    )

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        if len(lens) > _SIZE:
            return torch.full_like(lens, self.context.max_context_len)
        return super().plan_splits(lens)

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return acc[:, 0] if len(acc) >= _SIZE else super().combine(acc, lse, layer)


@fault(
    "general; split counts that follow the sum of keys (FlashInfer's planner)", "matches-oracle", modes="decode extend"
)
class KernelSwitchByKeysOffByOne(PlannedBackend):
    """Batches of more than 1,000 keys are planned without splits, but batches of 1,000 and more run without splits."""

    capabilities = KernelSwitchOffByOne.capabilities.with_changes(
        bounds={"kernel_changes_at": (), "kernel_changes_at_keys": {_KEYS}}
    )

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return torch.where(lens.sum() > _KEYS, self.context.max_context_len, super().plan_splits(lens)).to(lens.dtype)

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        assert self.metadata is not None
        return torch.where(self.metadata.kv_lens.sum() >= _KEYS, acc[:, 0], super().combine(acc, lse, layer))


@fault(
    "general; servers that build metadata twice (vLLM)",
    "replay-follows-batch matches-oracle buckets-independent padding-inert",
    executions="graph",
)
class MetadataMadeAnewBeforeCapture(PlannedBackend):
    """The second build, between warm-up and capture, makes new tensors, and replays fill those of the first build."""

    def init_forward_metadata_before_capture(self, batch: ForwardBatch) -> None:
        assert self.metadata is not None
        self.first, made = self.metadata, self.plan(batch)
        self.alive = [*getattr(self, "alive", []), made]
        self.metadata = Metadata(**{**vars(self.metadata), "page_table": made.page_table, "kv_lens": made.kv_lens})
