"""Scales of KV heads that a server changes in place: scales of a step, and scales with which graphs are captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_testkit.contract import AttentionLayer
from attn_testkit.watches.uploads import upload


def load_head_scales(layers: Sequence[AttentionLayer], scales: torch.Tensor | None) -> None:
    """Store ``scales`` [2, L, 1, 1, Hk, 1] float64 in the memory of the layers; None: 1, as at capture."""
    for place, layer in enumerate(layers):
        for part, held in enumerate((layer.k_head_scales, layer.v_head_scales)):
            if held is None:
                continue
            if scales is None:
                held.fill_(1.0)
            else:
                held.copy_(upload(scales[part, place].flatten().float(), held.device))
