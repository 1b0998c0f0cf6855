"""Class H: cascades, which attend to a common prefix once for many requests."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch

from .catalogue import fault
from .dense import DenseBackend, Visibility

_FROM_REQUESTS, _FROM_TOKENS = 8, 256
"""Thresholds of vLLM's cascade."""


@fault(
    "vLLM #17283",
    "matches-oracle",
    "KV tokens that it shares with other requests are missing",
    modes="decode extend",
    executions="eager",
)
class CascadePlannedForAllRequests(DenseBackend):
    """The common prefix is planned per request, although it is shared, so only the first request gets it."""

    capabilities = DenseBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16}},
        options={"logit_cap": False, "sinks": False},
        windows=(),
        bounds={"max_context_len": 1 << 12},
    )

    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor) -> Visibility:
        position, key_position, visible = super().visibility(batch, counts, offset)
        if batch.batch_size < _FROM_REQUESTS:
            return position, key_position, visible
        cached = self.key < (self.kv_lens - counts).min()
        common = ((self.slots == self.slots[:1]).all(0) & cached).long().cumprod(0)
        lost = common.bool() & (common.sum() >= _FROM_TOKENS)
        later = torch.arange(batch.batch_size, device=lost.device) > 0
        return position, key_position, visible & ~(later[:, None, None] & lost)
