"""Healthy controls of log-sum-exps, in the forms of real kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode, LogSumExp

from .catalogue import control
from .with_kv_splits import SplitKVBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND})
_LSE = LogSumExp(base="e", whole=_MODES, prefix=_MODES, pages=_MODES, tokens=_MODES)
_FEW = SplitKVBackend.capabilities.with_changes(
    eager=_MODES, graph=_MODES, kv_pool={"kv_dtypes": {"same"}, "page_sizes": {4}}
)


@control()
class KeysInParts(SplitKVBackend):
    """Natural log-sum-exps, rows before heads, merged by the backend (the parent of the faults of class Q)."""


@control("lse-base-2-heads-first")
class LseBase2HeadsFirst(SplitKVBackend):
    """Log-sum-exp in base 2 (FlashInfer, TRT-LLM), heads before rows (FlashAttention), as a non-contiguous view."""

    capabilities = _FEW.with_changes(lse=replace(_LSE, base="2", layout="[H, T]"))

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return (lse / math.log(2)).t()


@control()
class LseInTheModelsDtype(SplitKVBackend):
    """Log-sum-exp in bfloat16, merged by the backend, which rounds again, as declared (vLLM's TritonMLA)."""

    capabilities = _FEW.with_changes(lse=replace(_LSE, dtype="model", merges=True))

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        return lse.bfloat16()

    def merged_lse(self, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return (top.float() + total.float().log()).bfloat16()

    def weight(self, lse: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return torch.exp(lse.float() - top.float())


@control()
class LseOfRoundedProbabilities(SplitKVBackend):
    """The log-sum-exp sums probabilities that are rounded for the second product (FlashInfer's fa2, on tensor
    cores)."""

    capabilities = _FEW.with_changes(lse=_LSE)

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        logits = self.with_sinks(logits, layer)
        top = logits.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        return (top + torch.exp(logits - top).bfloat16().float().sum(-1, keepdim=True).log()).squeeze(-1)


@control()
class EmptyPartsOfAnyNumbers(SplitKVBackend):
    """The output of a split without keys and sinks is large and finite, and its weight is 0."""

    capabilities = _FEW.with_changes(lse=_LSE)

    def outputs(self, out: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return out if self.part.sinks else out.masked_fill(~seen.any(-1)[..., None, None, None], 1e4)
