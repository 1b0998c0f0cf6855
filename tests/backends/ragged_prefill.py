"""Prefill as the extend kernels of servers do it: the prefix by slot, new rows from k and v as they were given.

Written from the text of the contract alone.
"""

from __future__ import annotations

import torch

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVPools,
    Needs,
    Precision,
    ServerConventions,
)
from attn_testkit.examples.slot_index_kernel import attend, attend_slots, read_rows

MODES = frozenset(
    {ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.TARGET_VERIFY}
)


class RaggedPrefillBackend(KernelBackend):
    """New rows are stored by the kernel that attends them, and chains alone are verified."""

    capabilities = Capabilities(
        eager=MODES,
        graph=MODES,
        heads=HeadShapes(families={"mha", "gqa"}),
        precision=Precision(dtypes={"bf16"}, new_rows_as_given=MODES),
        kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}, page_sizes={1, 16}),
        bounds=Bounds(max_q_rows=8, max_topk=1),
        windows=MODES,
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_none_kv=True),
    )

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        """``run`` does it."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        layer, k_buffer, v_buffer = plan.layer, kv[0].flatten(0, 1), kv[1].flatten(0, 1)
        if plan.k is None or plan.v is None:
            return attend_slots(
                q, k_buffer, v_buffer, plan.cu_seqlens_q, plan.kv_indptr, plan.kv_indices, layer.scaling,
                plan.k_scale, plan.v_scale, layer.sliding_window_size,
            )  # fmt: skip
        out, row = torch.zeros_like(q), torch.arange(len(q), device=q.device)
        key = torch.arange(plan.max_kv_len, device=q.device)
        for request in range(len(plan.prefix_lens)):
            first, end = plan.cu_seqlens_q[request], plan.cu_seqlens_q[request + 1]
            count = plan.prefix_lens[request]
            slots = plan.prefix_indices[(plan.prefix_indptr[request] + key).clamp(max=len(plan.prefix_indices) - 1)]
            mine = (row >= first) & (row < end)
            position = torch.cat([key, count + row - first])
            seen = torch.cat([key < count, mine]) & (position <= (count + row - first)[:, None])
            if layer.sliding_window_size >= 0:
                seen &= position >= (count + row - first)[:, None] - layer.sliding_window_size
            keys = torch.cat([read_rows(k_buffer, slots) * plan.k_scale, plan.k.float()])
            values = torch.cat([read_rows(v_buffer, slots) * plan.v_scale, plan.v.float()])
            values = values.masked_fill(~(seen & mine[:, None]).any(0)[:, None, None], 0.0)
            result = attend(q, keys, values, seen, layer.scaling)
            out = torch.where(mine[:, None, None], result.to(q.dtype), out)
        self.context.kv_pool.set_kv_buffer(layer, plan.out_cache_loc, plan.k, plan.v)
        return out
