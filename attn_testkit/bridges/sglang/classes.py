"""What both releases of SGLang have alike: what their classes are below, and fields of a batch. Without SGLang."""

from __future__ import annotations

from typing import ClassVar

from attn_testkit.contract import AttentionBackend

from .claims import Claims

__all__ = ["SAME_FIELDS", "OfSGLang"]

SAME_FIELDS = (
    "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_sum", "seq_lens_cpu",
    "positions", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc",
    "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
)  # fmt: skip
"""Fields of ``ForwardBatch`` that are called alike in the kit and in SGLang, and mean the same."""


class OfSGLang(AttentionBackend):
    """The kit's contract on one side, on the other an object that SGLang's registry made."""

    claims: ClassVar[Claims]
    """Name in SGLang's registry, and how it is driven."""
