"""Healthy controls of scales: of the softmax, and of queries in FP8."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer

from .catalogue import control
from .g_query_scales import Fp8QueriesOfTheCheckpoint, Fp8QueriesScaled, Fp8QueriesScaledPerTensor
from .g_usual_scaling import UsualScaling
from .multi_step import MultiStepBackend
from .parent import Metadata


@control()
class UsualScalingAlone(UsualScaling):
    """The kernel has 1/sqrt(head_dim) built in, and no other scale is declared."""


@control()
class Fp8QueriesScaledPerToken(Fp8QueriesScaled):
    """One scale for all heads of a token, in eager steps and in graphs."""


@control("fp8-queries-scaled-per-tensor")
class Fp8QueriesScaledForAllRows(Fp8QueriesScaledPerTensor):
    """One scale for all live rows of a forward (sglang #28144)."""


@control()
class Fp8QueriesScaledPerTokenHead(Fp8QueriesScaled):
    """A scale for each head of each token, rounded up to a power of two (UE8M0 scales of Blackwell kernels)."""

    capabilities = Fp8QueriesScaled.capabilities.with_changes(precision={"q_scale": "per_token_head"})

    def scales(self, q: torch.Tensor, meta: Metadata, layer: AttentionLayer) -> torch.Tensor:
        return torch.exp2((q.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-40).log2().ceil())


@control()
class Fp8QueriesScaledFinerThanDeclared(Fp8QueriesScaled):
    """A scale per token, although one for all rows is declared: the error is smaller."""

    capabilities = Fp8QueriesScaledPerTensor.capabilities


@control("fp8-queries-scaled-by-the-checkpoint")
class Fp8QueriesScaledOfEachLayer(Fp8QueriesOfTheCheckpoint):
    """The checkpoint's scale of each layer's queries (vLLM's `q_scale`), in eager steps and in graphs."""


@control()
class Fp8QueriesScaledInDrafts(MultiStepBackend, Fp8QueriesScaledPerTensor):
    """Each forward of draft-decode has its own scale."""

    capabilities = MultiStepBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"fp8_e4m3"}}, precision={"matmul_dtype": "fp8_e4m3", "q_scale": "per_tensor"}
    )
