"""Class G: kernels that process heads in pairs."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer

from .catalogue import fault
from .parent import Metadata, PlannedBackend


@fault("general", "matches-oracle")
class HeadsInPairs(PlannedBackend):
    """A program has two query heads, and there are half as many programs as heads, rounded down."""

    capabilities = PlannedBackend.capabilities.with_changes(
        heads={"families": {"mha"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16}},
        options={"logit_cap": False},
    )

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        out[:, layer.tp_q_head_num // 2 * 2 :] = 0
        return out


@fault("general", "matches-oracle")
class KvHeadsInPairs(PlannedBackend):
    """A program processes two KV heads with their query heads, and the number of programs is rounded down."""

    capabilities = PlannedBackend.capabilities.with_changes(
        heads={"families": {"gqa", "mqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16}},
        options={"logit_cap": False},
    )

    def attend(self, q: torch.Tensor, layer: AttentionLayer, meta: Metadata) -> torch.Tensor:
        out = super().attend(q, layer, meta)
        if layer.tp_k_head_num > 1:
            out[:, layer.tp_k_head_num // 2 * 2 * layer.q_per_kv :] = 0
        return out
