"""Two backends for ``attn-testkit demo sparse``: an indexer of sparse attention that leaves out ReLU, and the same one
fixed."""

from __future__ import annotations

import torch

from ..contract import (
    Capabilities,
    ForwardMode,
    HeadShapes,
    Indexer,
    KernelBackend,
    KernelPlan,
    Needs,
    Precision,
    Sparse,
)


class Fixed(KernelBackend):
    """Decode in plain torch: scores the index keys of a request, selects the best, and attends to them."""

    capabilities = Capabilities(
        eager={ForwardMode.DECODE},
        graph={ForwardMode.DECODE},
        heads=HeadShapes(families={"mqa"}, gqa_ratios={4}, head_dims={64}),
        precision=Precision(dtypes={"bf16"}),
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4})),
        needs=Needs(cpu_seq_lens=False),
    )

    def activated(self, products: torch.Tensor) -> torch.Tensor:
        """[requests, heads, keys]: only positive products of a query head count."""
        return products.relu()

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Return the best keys of each request, [requests, 16] int32."""
        pool, layer_id, slots = self.context.index_pool, plan.layer.layer_id, plan.slot_table.long()
        assert pool is not None
        keys, scales = pool.get_keys(layer_id).flatten(0, 1).float()[slots], pool.get_scales(layer_id).flatten()[slots]
        products = self.activated(torch.einsum("bhd,bnd->bhn", q_index.float(), keys))
        scores = torch.einsum("bhn,bh->bn", products, weights) * scales
        is_key = torch.arange(scores.shape[1], device=scores.device) < plan.kv_lens[:, None]
        best = scores.masked_fill(~is_key, -torch.inf).topk(plan.layer.topk)
        return torch.where(is_key.gather(1, best.indices), best.indices, -1).to(torch.int32)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Attend to the selected keys."""
        assert plan.selected is not None
        no_key = (plan.selected < 0)[..., None]
        slots = plan.slot_table.gather(1, plan.selected.clamp(min=0).long())
        keys, values = (pool.flatten(0, 2)[slots].float().masked_fill(no_key, 0.0) for pool in kv)
        logits = q.float() @ keys.mT * plan.layer.scaling
        return (logits.masked_fill(no_key.mT, -torch.inf).softmax(-1) @ values).to(q.dtype)


class WithoutRelu(Fixed):
    """Negative products count too. 1CatAI/1Cat-vLLM #250."""

    def activated(self, products: torch.Tensor) -> torch.Tensor:
        """Return the products unchanged."""
        return products
