"""Code for both releases of SGLang: the base of their classes, and fields of a batch. Does not import SGLang."""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_testkit.contract import AttentionBackend, AttentionLayer

from ..rows import as_projected
from .capabilities import BridgeCapabilities

SAME_FIELDS = (
    "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_sum", "seq_lens_cpu",
    "positions", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc",
    "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
)  # fmt: skip
"""Fields of ``ForwardBatch`` that are called alike in the kit and in SGLang, and mean the same."""


class OfSGLang(AttentionBackend):
    """An adapter from the kit's contract to an object that SGLang's registry made."""

    declared: ClassVar[BridgeCapabilities]
    """Name in SGLang's registry, capabilities, and how the class is run."""


def of_projection(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Arguments that ``RadixAttention.forward`` gives a backend: q [T, heads * dim] from the model, k and v by
    heads."""
    if k is not None:
        k = as_projected(k).view(-1, layer.tp_k_head_num, layer.head_dim)
    if v is not None:
        v = as_projected(v).view(-1, layer.tp_v_head_num, layer.v_head_dim)
    return as_projected(q), k, v
