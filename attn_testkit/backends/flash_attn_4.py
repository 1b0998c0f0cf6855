"""FlashAttention 4's kernels of SM90, which CuTe DSL compiles: ``flash_attn_varlen_func`` over a page table.

All metadata are made on the device, so a replay needs nothing from the host.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from attn_testkit.contract import (
    BackendContext,
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    LayerOptions,
    LogSumExp,
    Needs,
    Precision,
    Requires,
    ServerConventions,
    Windows,
)

from .vendor import provide, why_not_here
from .vendor.flash_attn_kernels import VARLEN

_MODES = frozenset(ForwardMode)


class FlashAttn4Backend(KernelBackend):
    """MHA, GQA and MQA through ``flash_attn_varlen_func``."""

    not_here = why_not_here(VARLEN)
    capabilities: ClassVar[Capabilities] = Capabilities(
        eager=_MODES,
        graph=_MODES,
        # A kernel is compiled for each head dim, ratio, dtype and option. The package supports more than these.
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa"}),
            gqa_ratios=frozenset({1, 4, 8}),
            head_dims=frozenset({64, 128}),
            wider_keys=frozenset({64}),
            heads_by_layer=True,
        ),
        precision=Precision(dtypes=frozenset({"fp16", "bf16"})),
        # A page of 128 slots is loaded whole, and its tail must then be finite (the docstring of the entry point).
        kv_pool=KVPools(page_sizes=frozenset({16, 64}), kv_layouts=frozenset({"nhd"}), kv_groups=True),
        # Its masks are functions that are compiled, and a draft tree is data.
        bounds=Bounds(max_q_rows=64, max_topk=1, max_draft_branches=16),
        windows=Windows(_MODES, non_causal=frozenset({"left", "both"})),
        options=LayerOptions(
            logit_cap=True, sinks=True, non_causal=frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
        ),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(
            takes_none_kv=True,
            takes_bare_chains=True,
            takes_unset_width=True,
            takes_empty_batches=True,
            takes_requests_without_rows=True,
            takes_out=True,
        ),
        lse=LogSumExp(base="e", layout="[H, T]", whole=_MODES),
        requires=Requires(
            sm=(90, 90),
            packages=("flash-attn-4>=4.0.0b36,<5",),
            compilers=("nvidia-cutlass-dsl>=4.6.2",),
            why="the adapter calls FlashAttention 4's kernels of SM90",
        ),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        provided = provide(VARLEN, context.device)
        self._attend, self.kernels = provided.call, provided.kernels

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Attend to the pages of each request."""
        return self.run_return_lse(q, kv, plan)[0]

    def run_return_lse(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and return the natural log-sum-exp [Hq, T] as well."""
        layer = plan.layer
        window = None if layer.sliding_window_size < 0 else layer.sliding_window_size
        out, lse = self._attend(
            q,
            *kv,
            cu_seqlens_q=plan.cu_seqlens_q,
            seqused_k=plan.kv_lens,
            max_seqlen_q=plan.max_q_len,
            page_table=plan.page_table,
            softmax_scale=layer.scaling,
            causal=layer.causal,
            window_size=(window, window if layer.non_causal_window == "both" else None),
            learnable_sink=layer.sinks,
            softcap=layer.logit_cap,
            return_lse=True,
        )
        return out, lse
