"""Class F: what a backend says about windows, and what it does at the edge of that."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import AttentionLayer, BackendContext, ForwardMode, refuse_unclaimed
from .catalogue import fault
from .dense import DenseBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
WINDOWED = DenseBackend.capabilities.with_changes(
    families={"gqa"}, dtypes={"bf16"}, kv_dtypes={"same"}, head_dims={64}, gqa_ratios={2, 4}, logit_cap=False,
    sinks=False, max_context_len=1 << 14,
)  # fmt: skip


class ZeroIsNone(DenseBackend):
    """`if window > 0`: kernels of servers in which a window of 0 is none."""

    @override
    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(layer) if layer.sliding_window_size > 0 else self.visible


@fault(
    slug="narrowest-window-is-none",
    source="general; sglang's extend kernel, in which a window of 0 is none",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class NarrowestWindowIsNone(DenseBackend):
    """Windows from 4 on are claimed, and the kernel has none of 4: it asks for more than 4, and the claim for 4."""

    capabilities = WINDOWED.with_changes(min_window=4)

    @override
    def in_window(self, layer: AttentionLayer) -> torch.Tensor:
        return super().in_window(layer) if layer.sliding_window_size > 4 else self.visible


@fault(
    slug="narrower-window-than-claimed-is-accepted",
    source="general; sglang's extend kernel, in which a window of 0 is none",
    modes=_ALL,
    executions=("eager",),
    checks=("refuses-undeclared",),
    hint="a sliding window of size 0 is not claimed|the constructor accepted it",
)
class NarrowerWindowThanClaimedIsAccepted(ZeroIsNone):
    """A window of 0 is not claimed, and a model that has it is served without a window."""

    capabilities = WINDOWED.with_changes(min_window=1)

    def __init__(self, context: BackendContext) -> None:
        refuse_unclaimed(self.capabilities.with_changes(min_window=0), context)
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)
