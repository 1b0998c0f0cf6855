"""Class L: wrappers of several backends, and what one mode or class inherits from another."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..backends.torch_native import TorchNativeBackend
from ..contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    VerifyMask,
)
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)
_VERIFY = (ForwardMode.TARGET_VERIFY,)


class _Hybrid(AttentionBackend):
    """Healthy: two children, one for each layer, as a server wraps backends of hybrid models."""

    capabilities: ClassVar[Capabilities] = PlannedBackend.capabilities

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.children = [PlannedBackend(context) for _ in context.layers]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self.children[layer.layer_id].forward(q, k, v, layer, batch, save_kv_cache)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        for child in self.children:
            child.init_forward_metadata(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for child in self.children:
            child.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child in self.children:
            child.init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        for child in self.children:
            child.init_forward_metadata_in_graph(batch)


class _Wrapper(AttentionBackend):
    """Healthy: one child, every hook forwarded."""

    capabilities: ClassVar[Capabilities] = TorchNativeBackend.capabilities

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.child: AttentionBackend = TorchNativeBackend(context)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return self.child.forward(q, k, v, layer, batch, save_kv_cache)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.child.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.child.init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.child.init_forward_metadata_in_graph(batch)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self.child.verify_mask


@fault(
    slug="wrapper-swallows-warmup-hook",
    bug_class="L",
    source="sglang #30846",
    modes=_ALL,
    executions=("graph",),
    mechanism="the wrapper forwards every hook but one, and the base class's no-op runs instead of the child's",
    promises=("completes", "output-contract", "replay-follows-batch"),
    hint="no attribute|in_graph|returned shape",
    modelled="the hook is init_forward_metadata_in_graph",
)
class WrapperSwallowsInGraphHook(_Wrapper):
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.child.init_forward_metadata(batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        return None


@fault(
    slug="dispatcher-drops-the-verify-mask",
    bug_class="L",
    source="sglang #32920",
    modes=_VERIFY,
    executions=("graph",),
    mechanism="the dispatcher does not hand out its child's mask buffer, so the draft stage fills a mask that no "
    "graph reads",
    promises=("completes", "replay-follows-batch", "matches-oracle"),
    hint="replay",
)
class DispatcherDropsVerifyMask(_Wrapper):
    @property
    def verify_mask(self) -> VerifyMask | None:
        return None


@fault(
    slug="wrapper-replays-first-child-only",
    bug_class="L",
    source="sglang MUTATION_FIXES.md M19",
    modes=_ALL,
    executions=("graph",),
    mechanism="at a replay the wrapper plans its first child alone; the other one keeps what the capture left",
    promises=("replay-follows-batch", "writes-own-kv"),
    hint="layer 1",
)
class WrapperReplaysFirstChildOnly(_Hybrid):
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        for child in self.children if in_capture else self.children[:1]:
            child.init_forward_metadata_out_graph(batch, in_capture)


@fault(
    slug="wrapper-inits-second-child-only",
    bug_class="L",
    source="sglang MUTATION_FIXES.md M20",
    modes=_ALL,
    executions=("eager",),
    mechanism="in eager the wrapper plans its second child alone",
    promises=("completes", "matches-oracle"),
    hint="planned",
)
class WrapperInitsSecondChildOnly(_Hybrid):
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.children[-1].init_forward_metadata(batch)


@fault(
    slug="verify-honours-leftover-prefill-flag",
    bug_class="L",
    source="sglang comment in trtllm_mla_backend",
    modes=_VERIFY,
    executions=("graph",),
    mechanism="draft-extend sets a fallback flag, and verify on the same instance still honours it: causal, no tree",
    promises=("buckets-independent", "matches-oracle"),
    hint="alone|no ancestors",
)
class LeftoverFallbackFlag(PlannedBackend):
    fallback = False

    def plan(self, batch: ForwardBatch) -> Metadata:
        self.fallback |= batch.forward_mode.is_draft_extend(include_v2=True)
        return super().plan(batch)

    def plan_mask(self, batch: ForwardBatch) -> torch.Tensor:
        mask = super().plan_mask(batch)
        return torch.ones_like(mask).tril() if self.fallback else mask


@fault(
    slug="child-inherits-parent-buffer-layout",
    bug_class="L",
    source="sglang KNOWN_FAILURES.md C.3",
    modes=(ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2),
    executions=("graph",),
    mechanism="a subclass lays its buffers out in two dimensions, and draft-extend falls through to a parent that "
    "expects one",
    promises=("completes",),
    hint="shape|size",
)
class ChildInheritsParentLayout(PlannedBackend):
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.buffers.slots = self.buffers.slots.view(max_bs, -1)

    def views(self, batch: ForwardBatch) -> Metadata:
        views = super().views(batch)
        if not batch.forward_mode.is_draft_extend(include_v2=True):
            views.slots = self.buffers.slots.view(-1)[: batch.batch_size * views.max_q_len]
        return views
