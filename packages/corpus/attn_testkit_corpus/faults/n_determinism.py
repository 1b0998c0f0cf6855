"""Class N: declared equal bits that are missing, for the same batch twice or for a request in another batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, Requires

from .builds import BatchInvariantBackend
from .catalogue import fault, helper
from .dense import DenseBackend
from .orders import in_other_order
from .parent import Metadata, PlannedBackend
from .states import StateParent

_EVERY_OTHER_CALL = "every other call adds backwards three numbers whose sum depends on the order"


@fault(
    "flash-attention #2450; aiter #4378; FlashMLA #212",
    "batch-invariant",
    "depends on the rest of the batch",
    executions="eager",
    slug="split-count-depends-on-batchmates",
)
class SplitsDependOnBatchmates(BatchInvariantBackend):
    """The number of splits comes from the whole batch, so a row's order of summation depends on other rows."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return super().plan_splits(lens.amax().expand_as(lens))


@fault("sglang #26412", "batch-invariant", "layer 1", executions="eager", slug="fixed-split-dropped-on-swa-path")
class FixedSplitDroppedForWindows(BatchInvariantBackend):
    """The deterministic split size is passed on by every path but the windowed one."""

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        if layer.sliding_window_size >= 0:
            meta = replace(meta, chunk=self.plan_splits(meta.kv_lens.amax().expand_as(meta.kv_lens)))
        return super().attend(q, layer, meta)


@fault(
    "general",
    "batch-invariant",
    "depends on the rest of the batch",
    executions="eager",
    slug="split-size-from-batch-size",
)
class SplitsFromBatchSize(BatchInvariantBackend):
    """Keys are split further if there are few requests, to fill the device."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return super().plan_splits(lens) if len(lens) > 1 else lens.clamp(min=1)


@fault(
    "pegainfer #623",
    "batch-invariant",
    "depends on the rest of the batch",
    executions="eager",
    slug="another-kernel-above-32-requests",
)
class AnotherKernelAbove32Requests(BatchInvariantBackend):
    """Batches of more than 32 requests are split differently, so their bits differ from those of a small batch."""

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        return super().plan_splits(lens) if len(lens) <= 32 else lens.clamp(min=1)


@fault("general", "repeatable", "atomics", executions="eager", modelled=_EVERY_OTHER_CALL)
class OrderOfSumsVaries(PlannedBackend):
    """Partial sums are added in the order in which they arrive, although determinism is declared."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls = 0

    @helper
    def backwards(self, layer: AttentionLayer) -> bool:
        """True if this call adds from the last to the first."""
        return (self.calls - 1) // len(self.context.layers) % 2 == 0

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        self.calls += 1
        return in_other_order(super().attend(q, layer, meta), self.backwards(layer))


@fault("general", "repeatable", "layer 1", executions="eager", modelled=_EVERY_OTHER_CALL)
class LastLayerSumsInArrivalOrder(OrderOfSumsVaries):
    """Only the last layer, which has another kernel, adds partial sums in the order in which they arrive."""

    def backwards(self, layer: AttentionLayer) -> bool:
        return layer.layer_id == self.context.layers[-1].layer_id and super().backwards(layer)


@fault("general", "repeatable", "split count", executions="eager")
class FirstCallTunes(BatchInvariantBackend):
    """The first call of a shape runs an untuned kernel, and later calls run the one that was found to be fastest."""

    capabilities = PlannedBackend.capabilities

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.tuned = False

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        tuned, self.tuned = self.tuned, True
        return super().plan_splits(lens) if tuned else lens.clamp(min=1)


@fault(
    "general (persistent kernels that take work from a counter)",
    "replay-follows-batch",
    "order in which the programs of a launch run",
    modes="decode extend",
    executions="graph",
    modelled="a copy of the output takes the place of the attention kernel",
)
class RowsInTheOrderOfTickets(DenseBackend):
    """A program draws a place from a counter and stores its own row there, as if programs ran in order."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"decode", "extend"}, graph={"decode", "extend"}, requires=Requires(packages=("triton>=3.6",))
    )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        from .rows_in_turn import copied_in_turn

        return copied_in_turn(super().forward(q, k, v, layer, batch, save_kv_cache), own=False)


@fault(
    "general",
    "repeatable",
    "stored after the last row",
    modes="decode extend",
    executions="eager",
    modelled="the first step changes the last bit of the states that it stores",
)
class StoredStateSumsInArrivalOrder(StateParent):
    """Partial sums of the state that is stored are added in the order of arrival, and those of outputs are not."""

    steps = 0

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.steps += 1

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
        rows = rows.to(pool.dtype)
        if rows.dim() == 4 and self.steps == 1:
            bits = torch.int32 if pool.dtype == torch.float32 else torch.int16
            rows = (rows.view(bits) ^ 1).view(pool.dtype)
        super().store(pool, rows, index)
