"""torch's own attention over gathered keys, by the contract: scaled_dot_product_attention and flex_attention.

PYTHONPATH=tests/kernels attn-testkit run --backend torch_kernels:SDPA
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    Needs,
    ServerConventions,
)

_MODES = frozenset(ForwardMode)


class Gathered(KernelBackend):
    """Keys of each row in one tensor, and which of them it sees. Chains alone."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(families={"mha", "gqa", "mqa"}, head_dims={64, 128}),
        kv_pool=KVPools(page_sizes={1, 16, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        windows=_MODES,
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
        count = plan.cu_seqlens_q.diff()
        position = ((plan.kv_lens - count)[request] + row - plan.cu_seqlens_q[request])[:, None]
        key = torch.arange(plan.slot_table.shape[1], device=q.device)
        seen = key <= position
        if plan.layer.sliding_window_size >= 0:
            seen &= key >= position - plan.layer.sliding_window_size
        slots = torch.where(key < plan.kv_lens[:, None], plan.slot_table, 0)[request]
        # [T, heads, keys, D], and no number of a slot that is not the request's: 0 * NaN is NaN.
        k, v = (cache.flatten(0, 1)[slots].transpose(1, 2).masked_fill(~seen[:, None, :, None], 0.0) for cache in kv)
        # A row of padding sees nothing; torch gives it NaN or 0, and nobody reads it.
        return self.attend(q[:, :, None], k, v, seen, plan).squeeze(2)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        """``q`` [T, Hq, 1, D], ``k`` and ``v`` [T, Hk, keys, D], ``seen`` [T, keys]."""
        raise NotImplementedError


class SDPA(Gathered):
    """A boolean mask, and the kernel that torch chooses."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None, None], scale=plan.layer.scaling, enable_gqa=True
        )


class SDPAFloatMask(Gathered):
    """Attention with a float mask of the model's dtype, which holds -inf for hidden keys and a bias for others."""

    capabilities = Gathered.capabilities.with_changes(options={"qq_bias": {"extend", "target-verify"}})

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        if plan.qq_bias is not None:
            row = torch.arange(len(q), device=q.device)
            request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
            column = torch.arange(seen.shape[1], device=q.device) - plan.prefix_lens[request, None]
            columns = plan.qq_bias.gather(1, column.clamp(0, plan.qq_bias.shape[1] - 1))
            bias = torch.where((column >= 0) & (column < plan.qq_bias.shape[1]), columns, 0.0).to(q.dtype)
        mask = bias.masked_fill(~seen, -torch.inf)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None, None], scale=plan.layer.scaling, enable_gqa=True
        )


class Flex(Gathered):
    """``flex_attention`` without a compiler, which is torch's reference of it and not for graphs: it copies a number to
    the device at each call (``_math_attention_inner``). Mask and soft cap are a ``score_mod``."""

    capabilities = Gathered.capabilities.with_changes(
        graph=frozenset(), options={"logit_cap": True}, server={"eager_without_waits": False}
    )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        cap = plan.layer.logit_cap
        nothing = torch.full((), -torch.inf, device=q.device)  # a number would be copied to the device at each call

        def modify(
            score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            capped = cap * torch.tanh(score / cap) if cap else score
            return torch.where(seen[batch, key], capped, nothing)

        return flex_attention(q, k, v, score_mod=modify, scale=plan.layer.scaling, enable_gqa=True)  # type: ignore[return-value]
