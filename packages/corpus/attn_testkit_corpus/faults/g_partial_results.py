"""Class G: the log-sum-exps of partial results, and sinks with several of them."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer

from .catalogue import fault
from .parent import PlannedBackend


@fault("sglang #35045, #40903", "matches-oracle", "weights", slug="lse-base-mismatch-chunked-prefix")
class LseBaseMismatch(PlannedBackend):
    """Partial results have a log-sum-exp in base 2, but the merge treats it as a natural one."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().combine(acc, lse * 1.4426950408889634, layer)


@fault("flashinfer #58, #50", "matches-oracle", "log-sum-exps", slug="lse-wrong-when-split")
class LseWithoutMaximum(PlannedBackend):
    """A split stores the logarithm of its sum without its own maximum."""

    def partials(
        self, logits: torch.Tensor, seen: torch.Tensor, values: torch.Tensor, acc: torch.Tensor, lse: torch.Tensor
    ) -> None:
        super().partials(logits, seen, values, acc, lse)
        top = logits[:, None].masked_fill(~seen[:, :, :, None, None], -torch.inf).amax(-1).flatten(3, 4)
        lse.copy_(torch.where(top == -torch.inf, lse, lse - top))


@fault("rocm-libraries #12229", "matches-oracle", "a sink that counts")
class SinkCountedPerSplit(PlannedBackend):
    """Every split with keys adds the sink to its denominator, so the sink counts once per split."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        if layer.sinks is None:
            return super().combine(acc, lse, layer)
        mine = torch.exp(lse - torch.logaddexp(lse, layer.sinks))
        lse = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, layer.sinks))
        top = lse.amax(1, keepdim=True)
        weight = torch.exp(lse - top.masked_fill(top == -torch.inf, 0.0))
        return (acc * (mine * weight)[..., None]).sum(1) / weight.sum(1).clamp(min=1e-30)[..., None]
