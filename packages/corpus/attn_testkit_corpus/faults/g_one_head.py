"""Class G: kernels that take heads in pairs."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardMode

from .catalogue import fault
from .parent import Metadata, PlannedBackend


@fault(
    slug="heads-in-pairs",
    source="general",
    modes=tuple(ForwardMode),
    checks=("matches-oracle",),
    hint="",
)
class HeadsInPairs(PlannedBackend):
    """A program has two query heads, and there are half as many programs as heads, rounded down."""

    capabilities = PlannedBackend.capabilities.with_changes(
        families={"mha"}, dtypes={"bf16"}, head_dims={64}, kv_dtypes={"same"}, page_sizes={16}, logit_cap=False
    )

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        out[:, layer.tp_q_head_num // 2 * 2 :] = 0
        return out


@fault(
    slug="kv-heads-in-pairs",
    source="general",
    modes=tuple(ForwardMode),
    checks=("matches-oracle",),
    hint="",
)
class KvHeadsInPairs(PlannedBackend):
    """A program takes two of several KV heads, with their query heads, and the number of programs is rounded down."""

    capabilities = PlannedBackend.capabilities.with_changes(
        families={"gqa", "mqa"}, dtypes={"bf16"}, head_dims={64}, kv_dtypes={"same"}, page_sizes={16}, logit_cap=False
    )

    @override
    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if layer.tp_k_head_num > 1:
            out[:, layer.tp_k_head_num // 2 * 2 * layer.q_per_kv :] = 0
        return out
