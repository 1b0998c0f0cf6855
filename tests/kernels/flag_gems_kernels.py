"""FlagGems' decode kernel of MLA, by the contract.

PYTHONPATH=tests/kernels attn-testkit run --backend flag_gems_kernels:FlashMLA
"""

from __future__ import annotations

import torch
import triton
from alone import FLAG_GEMS, load

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    Needs,
    Promises,
    ServerConventions,
)

_BLOCK_H, _BLOCK_N = 64, 64


class FlashMLA(KernelBackend):
    """``flash_mla_attn_kernel``, launched as ``flash_mla`` does on SM90, but with the layer's scale: that function has
    1/sqrt(576), which is no model's."""

    capabilities = Capabilities(
        eager={"decode", "draft-decode"},
        graph={"decode", "draft-decode"},
        heads=HeadShapes(families={"mla"}, head_dims={512}, mla_rope_dims={64}, gqa_ratios={16, 64, 128}),
        kv_pool=KVPools(page_sizes={16, 64}),
        bounds=Bounds(max_draft_branches=4),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
        promises=Promises(deterministic=True),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, q = plan.layer, q.contiguous()
        rows = kv[0].flatten(0, 2)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        kernel = load("flag_gems.fused.flash_mla", FLAG_GEMS).flash_mla_attn_kernel
        kernel[(triton.cdiv(layer.tp_q_head_num, _BLOCK_H), len(q))](
            q, rows, plan.page_table, plan.kv_lens, out, layer.scaling, layer.tp_q_head_num, q.stride(0), q.stride(1),
            rows.stride(-2), plan.page_table.stride(0), *out.stride(), BLOCK_H=_BLOCK_H, BLOCK_N=_BLOCK_N,
            PAGE_SIZE=plan.page_size, HEAD_DIM_V=layer.v_head_dim, HEAD_DIM=layer.head_dim, num_warps=8, num_stages=3,
        )  # fmt: skip
        return out
