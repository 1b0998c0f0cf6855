"""Class J: device memory that grows at every step: lists that keep tensors, scratch that is allocated and not freed."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_FEW = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}}, precision={"dtypes": {"bf16"}}
)


@fault(
    "general (a list of plans for logging); flashinfer #2139",
    "memory-bounded",
    "keeps a tensor of every step",
    modes="decode extend",
)
class EveryPlanKept(PlannedBackend):
    """A list keeps the tensors of every plan, eager ones and those for replays."""

    capabilities = _FEW

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.history: list[Metadata] = []

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.history.append(super().plan(batch))
        return self.history[-1]


@fault("vLLM #26142", "memory-bounded", "a closure keeps a tensor of every step", modes="decode", executions="eager")
class OutputKeptByAClosure(PlannedBackend):
    """A callback of every forward is registered and never removed, and each holds the step's output."""

    capabilities = _FEW

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.callbacks = [lambda: 0]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        self.callbacks.append(lambda: len(out))
        return out


@fault(
    "general (a workspace that grows by a rounding up of its own size)",
    "memory-bounded",
    "its predecessor stays",
    modes="decode target-verify",
)
class ScratchLargerAtEveryStep(PlannedBackend):
    """Every plan requests more scratch than there is, because the size includes the growth of the last plan."""

    capabilities = _FEW

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.scratch = self.new_workspace(16)

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.scratch = self.new_workspace(self.scratch.numel() + batch.batch_size * 128)
        return super().plan(batch)
