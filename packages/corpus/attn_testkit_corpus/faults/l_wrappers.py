"""Class L: wrappers of several backends, and state that a mode or class inherits from another."""

from __future__ import annotations

import torch

from attn_testkit.contract import (
    ForwardBatch,
    VerifyMask,
)

from .catalogue import fault
from .parent import Metadata, PlannedBackend
from .wrapping import HybridBackend, WrapperBackend


@fault(
    "sglang #30846",
    "completes output-contract replay-follows-batch",
    "no attribute|in_graph|returned shape",
    executions="graph",
    slug="wrapper-swallows-warmup-hook",
    modelled="the hook is init_forward_metadata_in_graph",
)
class WrapperSwallowsInGraphHook(WrapperBackend):
    """The wrapper forwards every hook but one, and the base class's no-op runs instead of the child's."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.child.init_forward_metadata(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        return None


@fault(
    "sglang #32920",
    "completes replay-follows-batch matches-oracle",
    "replay",
    modes="target-verify",
    executions="graph",
    slug="dispatcher-drops-the-verify-mask",
)
class DispatcherDropsVerifyMask(WrapperBackend):
    """The dispatcher does not return its child's mask buffer, so the draft stage fills a mask that no graph reads."""

    @property
    def verify_mask(self) -> VerifyMask | None:
        return None


@fault("sglang MUTATION_FIXES.md M19", "replay-follows-batch writes-own-kv", "layer 1", executions="graph")
class WrapperReplaysFirstChildOnly(HybridBackend):
    """The wrapper plans only its first child at a replay; the other child keeps the values of the capture."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child in self.children if in_capture else self.children[:1]:
            child.init_forward_metadata_out_graph(batch, in_capture)


@fault("sglang MUTATION_FIXES.md M20", "completes matches-oracle", "planned", executions="eager")
class WrapperInitsSecondChildOnly(HybridBackend):
    """The wrapper plans only its second child in eager."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.children[-1].init_forward_metadata(batch)


@fault(
    "sglang comment in trtllm_mla_backend",
    "buckets-independent matches-oracle",
    "only in the graph|alone|not ancestors",
    modes="target-verify",
    executions="graph",
    slug="verify-honours-leftover-prefill-flag",
)
class LeftoverFallbackFlag(PlannedBackend):
    """Draft-extend sets a fallback flag, and verify on the same instance still obeys it: causal, no tree."""

    fallback = False

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.fallback |= batch.forward_mode.is_draft_extend(include_v2=True)
        return super().plan(batch)

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        mask = super().plan_mask(batch)
        return torch.ones_like(mask).tril() if self.fallback else mask


@fault(
    "sglang KNOWN_FAILURES.md C.3",
    "completes",
    "shape|size",
    modes="draft-extend draft-extend-v2",
    executions="graph",
    slug="child-inherits-parent-buffer-layout",
)
class ChildInheritsParentLayout(PlannedBackend):
    """A subclass lays its buffers out in two dimensions, and draft-extend falls through to a parent that expects
    one.
    """

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.buffers.slots = self.buffers.slots.view(max_bs, -1)

    def views(self, batch: ForwardBatch) -> Metadata:
        views = super().views(batch)
        if not batch.forward_mode.is_draft_extend(include_v2=True):
            views.slots = self.buffers.slots.view(-1)[: batch.batch_size * views.max_q_len]
        return views
