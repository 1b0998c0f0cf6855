"""Class G: backends that declare only the usual softmax scale, 1/sqrt(head_dim)."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode, refuse_undeclared

from .catalogue import fault
from .dense import DenseBackend

_ALL = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class UsualScaling(DenseBackend):
    """The scale is 1/sqrt(head_dim), and the layer's is ignored. Healthy if that is declared."""

    capabilities = DenseBackend.capabilities.with_changes(
        options={"any_scaling": False},
        heads={"families": {"gqa"}, "head_dims": {64, 96}, "gqa_ratios": {2, 4}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}},
        bounds={"max_context_len": 1 << 14},
    )

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().logits(rows, keys, replace(layer, scaling=self.width_of(layer) ** -0.5))

    def width_of(self, layer: AttentionLayer) -> int:
        """Width of a row, for the scale."""
        return layer.head_dim


@fault("general; kernels that pad a head dim to a power of two", "matches-oracle", "scale", modes=_ALL)
class ScaleOfAPaddedHeadDim(UsualScaling):
    """Rows of 96 are padded to 128, and the scale is computed from the padded width."""

    def width_of(self, layer: AttentionLayer) -> int:
        return 1 << (layer.head_dim - 1).bit_length()


@fault(
    "general",
    "refuses-undeclared",
    "the constructor accepted it",
    modes=_ALL,
    executions="eager",
    slug="other-scales-than-the-usual-are-accepted",
)
class OtherScalesAreAccepted(UsualScaling):
    """Only the usual scale is declared, but a model with another scale is accepted and served with the usual one."""

    def __init__(self, context: BackendContext) -> None:
        refuse_undeclared(self.capabilities.with_changes(options={"any_scaling": True}), context)
        self.context, self.mask_buffer = context, None
        self.key = torch.arange(context.max_context_len, device=context.device)
