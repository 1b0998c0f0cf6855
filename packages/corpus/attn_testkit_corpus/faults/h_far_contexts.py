"""Class H: splits that depend on max_context_len instead of the requests' lengths."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import PlannedBackend

_DECODE = (ForwardMode.DECODE,)


@fault(
    "general; split counts by max_context_len, merged in one block",
    "matches-oracle",
    "max_context_len",
    modes="decode",
    executions="eager",
    modelled="16 splits are merged, of as many as the context has pieces of 8192 tokens",
)
class MoreSplitsThanAreMerged(PlannedBackend):
    """A long context gives more splits than the merging kernel has lanes, and short requests use them all."""

    capabilities = LEAN.with_changes(
        eager=_DECODE,
        graph=(),
        heads={"families": {"mqa"}, "gqa_ratios": {2}},
        bounds={"max_context_len": 1 << 18, "max_topk": 0},
    )
    tile = 1

    def __init__(self, context: BackendContext) -> None:
        self.max_splits = -(-context.max_context_len // 8192)
        super().__init__(context)

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().combine(acc[:, :16], lse[:, :16], layer)
