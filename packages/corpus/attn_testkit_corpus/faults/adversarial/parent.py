"""The parent of adversarial backends: right, or wrong if it cheats, with one hook per kind of cheat."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, Capabilities, ForwardBatch

from ..dense import DenseBackend


class AdversarialBackend(DenseBackend):
    """Right if it does not cheat. If it cheats, its results are wrong, and it tries to hide that."""

    capabilities: ClassVar[Capabilities] = DenseBackend.capabilities.with_changes(
        eager={"decode"},
        graph={"decode"},
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16}},
        bounds={"max_q_rows": 1, "max_topk": 0},
        windows={"in_trees": False},
    )
    cheats: ClassVar[bool] = True
    """False in the healthy control."""

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        right = super().forward(q, k, v, layer, batch, save_kv_cache)
        return self.answer(right, layer, batch)

    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        """Output of ``forward``: ``right`` [T, Hq, Dv], or three quarters of it if the backend cheats."""
        return right * 0.75 if self.cheats else right
