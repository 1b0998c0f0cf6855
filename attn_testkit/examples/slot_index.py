"""The adapter of a kernel that finds keys by slot (SGLang, LightLLM) and has its own cache writer."""

from __future__ import annotations

import torch

from ..contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    LayerOptions,
    Needs,
    Promises,
    ServerConventions,
    Windows,
)
from .slot_index_kernel import attend_slots, store_slots


class SlotIndexBackend(KernelBackend):
    """Every mode, only chains; pages of any size, which the kernel never sees."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(families={"mha", "gqa", "mqa"}),
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={1, 4, 16, 64}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        windows=Windows(frozenset(ForwardMode)),
        options=LayerOptions(logit_cap=True, sinks=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
        promises=Promises(deterministic=True),
    )

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        """Store rows with the kernel's own writer."""
        buffers = self.context.kv_pool.get_kv_buffer(plan.layer.layer_id)
        store_slots(k, v, *buffers, plan.out_cache_loc, plan.k_scale, plan.v_scale)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Call the kernel once. Shapes as in ``KernelBackend.run``."""
        layer = plan.layer
        return attend_slots(
            q, kv[0].flatten(0, 1), kv[1].flatten(0, 1), plan.cu_seqlens_q, plan.kv_indptr, plan.kv_indices,
            layer.scaling, plan.k_scale, plan.v_scale, layer.sliding_window_size, layer.logit_cap, layer.sinks,
        )  # fmt: skip
