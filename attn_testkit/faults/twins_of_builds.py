"""Healthy twins that are built otherwise: what they keep between steps, what they share, what they size by what."""

from __future__ import annotations

from dataclasses import fields

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import ForwardBatch
from .builds import CascadeBackend, KeptPlansBackend, RegisterRowsBackend, TiledBackend
from .catalogue import twin
from .parent import PlannedBackend

_LEAN = PlannedBackend.capabilities.with_changes(families={"gqa", "mqa"}, dtypes={"bf16"}, head_dims={64})


@twin(name="plans-kept-by-complete-key", why="eager plans are kept by all that they are made from, mask included")
class PlansKeptByCompleteKey(KeptPlansBackend):
    capabilities = _LEAN.with_changes(graph={"target-verify"}, eager={"target-verify", "draft-extend"})


@twin(name="cascade", why="a prefix that all requests share is attended once, and merged by log-sum-exp (vLLM)")
class Cascade(CascadeBackend):
    capabilities = _LEAN.with_changes(graph={"decode", "draft-extend"}, eager={"decode", "draft-extend"})


@twin(name="new-rows-from-registers", why="one kernel attends the new rows from k and v and stores them too")
class NewRowsFromRegisters(RegisterRowsBackend):
    capabilities = _LEAN.with_changes(
        graph={"decode", "target-verify"}, eager={"decode", "target-verify", "draft-extend"}, kv_dtypes={"same"}
    )


@twin(name="lazy-rescale", why="the running maximum is raised only by more than a threshold (FlashAttention 4)")
class LazyRescale(TiledBackend):
    capabilities = _LEAN.with_changes(graph={"draft-extend-v2"}, eager={"decode", "draft-extend-v2"})


@twin(name="graph-buffers-in-eager-too", why="eager steps that fit use the graphs' buffers, larger ones fresh memory")
class GraphBuffersInEagerToo(PlannedBackend):
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

    def fits(self, batch: ForwardBatch) -> bool:
        """Before the graphs there are no buffers."""
        return hasattr(self, "buffers") and batch.batch_size <= len(self.buffers.kv_lens)


@twin(name="context-to-the-last-token", why="tables and masks of exactly max_context_len keys, whole pages or not")
class ContextToTheLastToken(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(
        graph={"target-verify"},
        eager={"target-verify", "draft-extend-v2"},
        families={"gqa"},
        dtypes={"bf16"},
        head_dims={64},
        page_sizes={4, 16, 64},
        gqa_ratios={2, 3, 24},
        max_q_rows=40,
    )
