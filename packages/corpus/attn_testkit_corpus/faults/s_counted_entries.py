"""Class S, entries without a key, which count only in some requests, or only in the denominator."""

from __future__ import annotations

import torch

from attn_testkit.contract import KernelPlan

from .catalogue import fault
from .sparse import SparseParent

_LONG = 16


@fault(
    "general (a fast path for long requests that does not test for -1)",
    "reads-own-kv matches-oracle finite",
    "-1 .* key 0",
    modes="decode extend",
)
class NoKeyIsKeyZeroInLongRequests(SparseParent):
    """-1 counts as key 0 in requests of 16 keys and more."""

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        long = plan.kv_lens[self.request_of_row(selected, plan)] >= _LONG
        return super().is_key(selected, plan) | long[:, None]


@fault("general (lanes that are loaded as zeros and not masked)", "matches-oracle", "still count in the denominator")
class ZerosCountInTheDenominator(SparseParent):
    """Each entry of -1 loads zeros, and its exp(0) is added to the denominator."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        there = plan.selected >= 0
        slot = self.slots(plan.selected, plan)
        k, v = (each.flatten(0, 1)[slot][:, :, 0].float().masked_fill(~there[..., None], 0.0) for each in kv)
        logits = q.float() @ k.mT * plan.layer.scaling
        return (torch.softmax(logits, -1) @ v).masked_fill(~there.any(1)[:, None, None], 0.0).to(q.dtype)
