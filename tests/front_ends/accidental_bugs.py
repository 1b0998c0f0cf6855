"""Five backends with a bug that is made by accident: smoke does not try what shows it, and core does."""

from __future__ import annotations

import torch

from attn_testkit.contract import Capabilities, HeadShapes, KernelPlan, KVPools, Needs, Precision
from attn_testkit.examples import MinimalBackend

__all__ = ["Fp16Accumulator", "NarrowPageOffsets", "OneRemainder", "RaisesInAGroup", "ShortContext"]

BLOCK = 16
"""Number of keys that a kernel adds to its accumulator at a time."""


class Decode(MinimalBackend):
    """A correct decode kernel, eager only, so that smoke is quick."""

    capabilities = Capabilities(
        eager={"decode"},
        heads=HeadShapes(families={"mha", "gqa"}, head_dims={64, 128}, gqa_ratios={2, 4, 8}),
        precision=Precision(dtypes={"fp16", "bf16"}),
        kv_pool=KVPools(page_sizes={16, 64}),
        needs=Needs(cpu_seq_lens=False),
    )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        request, visible = self.visible(q, plan)
        k, v = (cache[self.pages(cache, plan)].flatten(1, 2)[request].float() for cache in kv)
        rows = q.view(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,tshd->thgs", rows, k) * plan.layer.scaling
        p = logits.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).nan_to_num()
        return self.sum_of(p, v.masked_fill(~visible[:, :, None, None], 0.0)).flatten(1, 2).to(q.dtype)

    def pages(self, cache: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[bs, max_pages] int64: pages of each request."""
        return plan.page_table.long()

    def sum_of(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[T, Hk, Hq / Hk, Dv]: values ``v`` [T, keys, Hk, Dv] times weights ``p`` [T, Hk, Hq / Hk, keys]."""
        return torch.einsum("thgs,tshd->thgd", p, v)


class ShortContext(Decode):
    """Attends to the first 1,100 keys of a request and to no further one."""

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        request, seen = super().visible(q, plan)
        return request, seen & (torch.arange(seen.shape[1], device=q.device) < 1100)


class OneRemainder(Decode):
    """Loses the last key if the number of keys is 77 modulo 128."""

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        request, seen = super().visible(q, plan)
        kept = plan.kv_lens - (plan.kv_lens % 128 == 77).to(torch.int32)
        return request, seen & (torch.arange(seen.shape[1], device=q.device) < kept[request][:, None])


class RaisesInAGroup(Decode):
    """Declares groups of four query heads, and raises for them."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        if plan.layer.q_per_kv == 4:
            raise NotImplementedError("a group of 4 query heads")
        return super().run(q, kv, plan)


class NarrowPageOffsets(Decode):
    """Computes the offset of a page in 32 bits, which lose the upper half of the product in a large pool."""

    def pages(self, cache: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        offsets = plan.page_table * cache.stride(0)
        assert offsets.dtype is torch.int32
        return torch.div(offsets, cache.stride(0), rounding_mode="floor").long() % len(cache)


class Fp16Accumulator(Decode):
    """Adds the products of weights and values in fp16, sixteen keys at a time."""

    def sum_of(self, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(*p.shape[:3], v.shape[-1], dtype=torch.float16, device=p.device)
        for start in range(0, v.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            total = (total + super().sum_of(p[..., part], v[:, part])).to(torch.float16)
        return total
