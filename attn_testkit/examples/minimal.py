"""A backend made from one kernel call, as the README shows it."""

from __future__ import annotations

import torch

from ..contract import Bounds, Capabilities, ForwardMode, HeadShapes, KernelBackend, KernelPlan, KVPools, Needs


class MinimalBackend(KernelBackend):
    """Causal attention over paged keys, in plain torch."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(families={"mha", "gqa"}),
        kv_pool=KVPools(page_sizes={1, 16}),
        bounds=Bounds(max_q_rows=8, max_topk=1),
        needs=Needs(cpu_seq_lens=False),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Attend from every query row to every slot of its request, masked, in float32. Shapes as in
        ``KernelBackend.run``."""
        request, visible = self.visible(q, plan)
        k, v = (cache[plan.page_table.long()].flatten(1, 2)[request].float() for cache in kv)
        rows = q.view(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,tshd->thgs", rows, k) * plan.layer.scaling
        p = logits.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).nan_to_num()
        v = v.masked_fill(~visible[:, :, None, None], 0.0)
        return torch.einsum("thgs,tshd->thgd", p, v).flatten(1, 2).to(q.dtype)

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Request of each row [T], and the slots that it sees [T, max_pages * page_size]."""
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1).clamp(max=len(plan.kv_lens) - 1)
        count = plan.cu_seqlens_q.diff()
        position = (plan.kv_lens - count)[request] + row - plan.cu_seqlens_q[request]
        slots = plan.page_table.shape[1] * plan.page_size
        return request, torch.arange(slots, device=q.device) <= position[:, None]
