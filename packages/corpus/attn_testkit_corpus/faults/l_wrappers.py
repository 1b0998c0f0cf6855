"""Class L: wrappers of several backends, and state that a mode or class inherits from another."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import (
    ForwardBatch,
    ForwardMode,
    VerifyMask,
)

from .catalogue import fault
from .parent import Metadata, PlannedBackend
from .wrapping import HybridBackend, WrapperBackend

_ALL = tuple(ForwardMode)
_VERIFY = (ForwardMode.TARGET_VERIFY,)


@fault(
    slug="wrapper-swallows-warmup-hook",
    source="sglang #30846",
    modes=_ALL,
    executions=("graph",),
    checks=("completes", "output-contract", "replay-follows-batch"),
    hint="no attribute|in_graph|returned shape",
    modelled="the hook is init_forward_metadata_in_graph",
)
class WrapperSwallowsInGraphHook(WrapperBackend):
    """The wrapper forwards every hook but one, and the base class's no-op runs instead of the child's."""

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.child.init_forward_metadata(batch)

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        return None


@fault(
    slug="dispatcher-drops-the-verify-mask",
    source="sglang #32920",
    modes=_VERIFY,
    executions=("graph",),
    checks=("completes", "replay-follows-batch", "matches-oracle"),
    hint="replay",
)
class DispatcherDropsVerifyMask(WrapperBackend):
    """The dispatcher does not return its child's mask buffer, so the draft stage fills a mask that no graph reads."""

    @property
    @override
    def verify_mask(self) -> VerifyMask | None:
        return None


@fault(
    slug="wrapper-replays-first-child-only",
    source="sglang MUTATION_FIXES.md M19",
    modes=_ALL,
    executions=("graph",),
    checks=("replay-follows-batch", "writes-own-kv"),
    hint="layer 1",
)
class WrapperReplaysFirstChildOnly(HybridBackend):
    """The wrapper plans only its first child at a replay; the other one keeps the values of the capture."""

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child in self.children if in_capture else self.children[:1]:
            child.init_forward_metadata_out_graph(batch, in_capture)


@fault(
    slug="wrapper-inits-second-child-only",
    source="sglang MUTATION_FIXES.md M20",
    modes=_ALL,
    executions=("eager",),
    checks=("completes", "matches-oracle"),
    hint="planned",
)
class WrapperInitsSecondChildOnly(HybridBackend):
    """The wrapper plans only its second child in eager."""

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.children[-1].init_forward_metadata(batch)


@fault(
    slug="verify-honours-leftover-prefill-flag",
    source="sglang comment in trtllm_mla_backend",
    modes=_VERIFY,
    executions=("graph",),
    checks=("buckets-independent", "matches-oracle"),
    hint="only in the graph|alone|not ancestors",
)
class LeftoverFallbackFlag(PlannedBackend):
    """Draft-extend sets a fallback flag, and verify on the same instance still obeys it: causal, no tree."""

    fallback = False

    @override
    def plan(self, batch: ForwardBatch) -> Metadata:
        self.fallback |= batch.forward_mode.is_draft_extend(include_v2=True)
        return super().plan(batch)

    @override
    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        mask = super().plan_mask(batch)
        return torch.ones_like(mask).tril() if self.fallback else mask


@fault(
    slug="child-inherits-parent-buffer-layout",
    source="sglang KNOWN_FAILURES.md C.3",
    modes=(ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2),
    executions=("graph",),
    checks=("completes",),
    hint="shape|size",
)
class ChildInheritsParentLayout(PlannedBackend):
    """A subclass lays its buffers out in two dimensions, and draft-extend falls through to a parent that expects
    one.
    """

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.buffers.slots = self.buffers.slots.view(max_bs, -1)

    @override
    def views(self, batch: ForwardBatch) -> Metadata:
        views = super().views(batch)
        if not batch.forward_mode.is_draft_extend(include_v2=True):
            views.slots = self.buffers.slots.view(-1)[: batch.batch_size * views.max_q_len]
        return views
