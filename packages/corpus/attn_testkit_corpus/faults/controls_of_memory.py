"""Healthy controls whose device memory grows up to a limit, or that read memory by addresses."""

from __future__ import annotations

from collections import deque

import torch

from attn_testkit.contract import BackendContext, ForwardBatch

from .catalogue import control
from .parent import Metadata, PlannedBackend
from .pool_addresses import ReadsByAddress

_FEW = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}}, precision={"dtypes": {"bf16"}}
)


@control()
class ScratchOfTheLargestStep(PlannedBackend):
    """Scratch is reallocated when a step needs more than any step before, like workspaces of servers."""

    capabilities = _FEW

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.scratch = self.new_workspace(1)

    def plan(self, batch: ForwardBatch) -> Metadata:
        needed = 256 * len(batch.input_ids)
        if needed > self.scratch.numel():
            self.scratch = self.new_workspace(needed)
        return super().plan(batch)


@control()
class WorkspacesByShape(PlannedBackend):
    """A cache keeps one workspace for each batch size and number of rows, and one plan for each of the last eight
    steps; FlashInfer's wrappers of a server are such a cache."""

    capabilities = _FEW

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.by_shape: dict[tuple[int, int], torch.Tensor] = {}
        self.recent: deque[Metadata] = deque(maxlen=8)

    def plan(self, batch: ForwardBatch) -> Metadata:
        shape = batch.batch_size, len(batch.input_ids)
        if shape not in self.by_shape:
            self.by_shape[shape] = self.new_workspace(64 * shape[1])
        self.recent.append(super().plan(batch))
        return self.recent[-1]


@control("rows-by-addresses-of-64-bits")
class RowsByAddressesOf64Bits(ReadsByAddress):
    """The address of each row of K and of V is computed separately, as in kernels with tables of pointers."""
