"""Healthy controls for the parents that are built differently, and for state that they keep, share and size."""

from __future__ import annotations

from dataclasses import fields

import torch

from attn_testkit.contract import BackendContext, ForwardBatch

from .builds import (
    BatchInvariantBackend,
    CascadeBackend,
    FixedStrideBackend,
    KeptPlansBackend,
    ModeInvariantBackend,
    RegisterRowsBackend,
    SplitsOfFixedTokensBackend,
    TiledBackend,
    WorkListBackend,
)
from .catalogue import control, helper
from .dense import DenseBackend
from .parent import PlannedBackend
from .wrapping import HybridBackend, WrapperBackend

_LEAN = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa", "mqa"}, "head_dims": {64}}, precision={"dtypes": {"bf16"}}
)


@control()
class PlansKeptByCompleteKey(KeptPlansBackend):
    """Eager plans are kept by everything that they depend on, mask included."""

    capabilities = _LEAN.with_changes(
        graph={"target-verify"}, eager={"target-verify", "draft-extend"}, server={"eager_without_waits": False}
    )


@control()
class Cascade(CascadeBackend):
    """A prefix that all requests share is attended to once, and merged by log-sum-exp (vLLM)."""

    capabilities = _LEAN.with_changes(graph={"decode", "draft-extend"}, eager={"decode", "draft-extend"})


@control()
class NewRowsFromRegisters(RegisterRowsBackend):
    """One kernel attends to the new rows from k and v and stores them too."""

    capabilities = _LEAN.with_changes(
        graph={"decode", "target-verify"},
        eager={"decode", "target-verify", "draft-extend"},
        kv_pool={"kv_dtypes": {"same"}},
    )


@control()
class LazyRescale(TiledBackend):
    """The running maximum is raised only by more than a threshold (FlashAttention 4)."""

    capabilities = _LEAN.with_changes(graph={"draft-extend-v2"}, eager={"decode", "draft-extend-v2"})


@control()
class FixedQueryStride(FixedStrideBackend):
    """Captured kernels find rows by a fixed stride if all requests have equally many, else by offsets."""

    capabilities = _LEAN.with_changes(graph={"draft-extend", "draft-extend-v2"}, eager=())


@control()
class WorkList(WorkListBackend):
    """Work items of the whole batch are numbered consecutively, and a kernel stops at their total."""

    capabilities = _LEAN.with_changes(graph={"decode"}, eager={"draft-extend-v2"})


@control()
class BatchInvariant(BatchInvariantBackend):
    """A request's bits do not depend on its batch, and that is declared."""

    capabilities = BatchInvariantBackend.capabilities.with_changes(
        graph={"decode"},
        eager=DenseBackend.capabilities.eager,
        heads={"families": {"gqa", "mqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
    )


@control()
class AChildForEachLayer(HybridBackend):
    """A wrapper holds a backend for each layer, and every hook reaches all of them."""

    capabilities = _LEAN.with_changes(graph={"draft-extend"}, eager={"target-verify"})


@control()
class AChildBehindEveryHook(WrapperBackend):
    """A wrapper that adds nothing: every hook and the mask buffer are its child's."""

    capabilities = _LEAN.with_changes(graph={"target-verify"}, eager={"decode"}, bounds={"max_context_len": 1 << 14})


@control()
class EverythingInTheGraph(DenseBackend):
    """Nothing is planned or kept: the graph rebuilds everything from the batch's own tensors."""

    # Without the case of 66,000 keys, which costs minutes without a device.
    capabilities = DenseBackend.capabilities.with_changes(bounds={"max_context_len": 1 << 14})


@control()
class GraphBuffersInEagerToo(PlannedBackend):
    """Eager steps that fit use the graphs' buffers. Larger steps allocate new memory."""

    capabilities = _LEAN.with_changes(graph={"decode", "draft-extend"}, eager={"decode", "draft-extend"})

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        plan = self.metadata
        assert plan is not None
        if not self.fits(batch):
            return
        views = self.views(batch)
        for field in fields(views):
            target, source = getattr(views, field.name), getattr(plan, field.name)
            if field.name != "slots" and isinstance(target, torch.Tensor):
                target.copy_(source)
        views.slots = plan.slots
        self.metadata = views

    @helper
    def fits(self, batch: ForwardBatch) -> bool:
        """True if the buffers exist and the batch fits; before the graphs there are none."""
        return hasattr(self, "buffers") and batch.batch_size <= len(self.buffers.kv_lens)


@control()
class ContextToTheLastToken(DenseBackend):
    """Tables and masks of exactly max_context_len keys, whole pages or not."""

    capabilities = DenseBackend.capabilities.with_changes(
        graph={"target-verify"},
        eager={"target-verify", "draft-extend-v2"},
        heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2, 3, 24}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {4, 16, 64}},
        bounds={"max_q_rows": 40},
    )


@control()
class PartialResultsInTheModelsDtype(PlannedBackend):
    """Results of many splits are rounded to the model's dtype before they are merged (FlashInfer's split decode)."""

    capabilities = _LEAN.with_changes(
        graph={"decode"}, eager={"decode", "target-verify", "extend"}, precision={"dtypes": {"bf16", "fp16"}}
    )
    most_splits = 96

    def __init__(self, context: BackendContext) -> None:
        self.max_splits = min(self.most_splits, context.max_context_len)
        super().__init__(context)

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        acc.copy_(acc.to(self.context.dtype))


@control()
class ModeInvariant(ModeInvariantBackend):
    """Decode, verify and extend give the same bits, for servers that train on their own output."""

    capabilities = ModeInvariantBackend.capabilities.with_changes(
        graph=(), eager={"decode", "extend", "target-verify"}, options={"logit_cap": False, "sinks": False}
    )


@control()
class ModeInvariantInGraphs(SplitsOfFixedTokensBackend):
    """KV splits of a fixed number of tokens give the bits of eager mode in graphs too (vLLM's batch-invariant mode)."""
