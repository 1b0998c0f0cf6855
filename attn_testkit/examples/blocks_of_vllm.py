"""A backend that lays out its KV pool itself, in the shape of vLLM's documentation: [blocks, KV heads, block size, 2 *
D]."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HeadShapes,
    KernelBackend,
    KernelPlan,
    KVLayer,
    KVPools,
    KVPoolSpec,
    Needs,
    Promises,
    ServerConventions,
)


class BlocksOfVllmBackend(KernelBackend):
    """Block table, sequence lengths, query offsets and slot mapping; K and V of a head share a row. Only chains."""

    capabilities = Capabilities(
        eager=frozenset(ForwardMode),
        graph=frozenset(ForwardMode),
        heads=HeadShapes(families={"mha", "gqa", "mqa"}),
        kv_pool=KVPools(kv_layouts={"custom"}, page_sizes={16, 32}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
        server=ServerConventions(padding_slots={0, -1}, takes_none_kv=True),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
    )

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        """Allocate one tensor per layer. Views of it show the kit where K and V of a slot are."""
        shapes = [(spec.pages, each.tp_k_head_num, spec.page_size, 2 * each.head_dim) for each in spec.layers]
        caches = [torch.zeros(shape, dtype=spec.dtype, device=spec.device) for shape in shapes]
        halves = [cache.transpose(1, 2).chunk(2, -1) for cache in caches]
        return [KVLayer(key, value, cache) for (key, value), cache in zip(halves, caches, strict=True)]

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, plan: KernelPlan) -> None:
        """Store rows like ``reshape_and_cache``: rows of padding go to block 0, which no request owns."""
        cache = self.context.kv_pool.get_layer_buffer(plan.layer.layer_id)
        slot_mapping = plan.out_cache_loc.clamp(min=0)
        rows = torch.cat([k, v], -1).to(cache.dtype)
        cache[slot_mapping // plan.page_size, :, slot_mapping % plan.page_size] = rows

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Attend from every row to every block of its request, masked, in float32. Shapes as in
        ``KernelBackend.run``."""
        cache = self.context.kv_pool.get_layer_buffer(plan.layer.layer_id)
        query_start_loc, seq_lens = plan.cu_seqlens_q, plan.kv_lens
        row = torch.arange(len(q), device=q.device)
        request = (torch.searchsorted(query_start_loc, row, right=True) - 1).clamp(max=len(seq_lens) - 1)
        position = (seq_lens - query_start_loc.diff())[request] + row - query_start_loc[request]
        # [T, heads, keys, 2 * D], blocks of a request one after the other.
        blocks = cache[plan.page_table.long()].transpose(1, 2).flatten(2, 3)[request].float()
        k, v = blocks.chunk(2, -1)
        visible = torch.arange(k.shape[2], device=q.device) <= position[:, None]
        rows = q.reshape(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,thsd->thgs", rows, k) * plan.layer.scaling
        p = logits.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).nan_to_num()
        v = v.masked_fill(~visible[:, None, :, None], 0.0)
        return torch.einsum("thgs,thsd->thgd", p, v).flatten(1, 2).to(q.dtype)
