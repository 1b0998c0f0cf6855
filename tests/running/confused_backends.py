"""Backends that are wrong in ways that look like something else at first: what a failure's text has to tell apart."""

from __future__ import annotations

import torch

from attn_testkit.contract import KernelPlan
from attn_testkit.examples import MinimalBackend

_Cache = tuple[torch.Tensor, torch.Tensor]
ALL = MinimalBackend.capabilities


class _Eager(MinimalBackend):
    capabilities = ALL.with_changes(graph=())


class ResultsInAnotherOrder(_Eager):
    """Requests are rotated by one, and never rotated back."""

    def run(self, q: torch.Tensor, kv: _Cache, plan: KernelPlan) -> torch.Tensor:
        return super().run(q, kv, plan).roll(1, 0)


class OffsetsAtAUniformStride(_Eager):
    """Every request is taken to have as many rows as the mean."""

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        _, seen = super().visible(q, plan)
        count = len(plan.kv_lens)
        stride = len(q) // count
        row = torch.arange(len(q), device=q.device)
        taken = (row // stride).clamp(max=count - 1)
        last = plan.kv_lens[taken] - stride + row % stride
        keys = torch.arange(seen.shape[-1], device=q.device)
        return taken, keys <= last[:, None]


class ReadsNoKV(_Eager):
    def run(self, q: torch.Tensor, kv: _Cache, plan: KernelPlan) -> torch.Tensor:
        return torch.zeros_like(super().run(q, kv, plan))


class CapacityOf256(_Eager):
    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        request, seen = super().visible(q, plan)
        return request, seen & (torch.arange(seen.shape[-1], device=q.device) < 256)


class CapacityOf2048(_Eager):
    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        request, seen = super().visible(q, plan)
        return request, seen & (torch.arange(seen.shape[-1], device=q.device) < 2048)


class LastKeyLostInSomeHeads(_Eager):
    """The first head of each group stops one key early."""

    def run(self, q: torch.Tensor, kv: _Cache, plan: KernelPlan) -> torch.Tensor:
        right = super().run(q, kv, plan)
        self._shorter = True
        wrong = super().run(q, kv, plan)
        self._shorter = False
        shape = (len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1)
        out = right.clone()
        out.view(shape)[:, :, 0] = wrong.view(shape)[:, :, 0]
        return out

    _shorter = False

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        request, seen = super().visible(q, plan)
        if not self._shorter:
            return request, seen
        last = plan.kv_lens[request].long() - 1
        return request, seen & (torch.arange(seen.shape[-1], device=q.device) != last[:, None])


class SecondTileOfRows(_Eager):
    """Rows from 16 on see one key too few."""

    capabilities = ALL.with_changes(graph=(), bounds={"max_q_rows": 33})

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        request, seen = super().visible(q, plan)
        row = torch.arange(len(q), device=q.device) - plan.cu_seqlens_q[request]
        last = plan.kv_lens[request] - plan.cu_seqlens_q.diff()[request] + row
        keys = torch.arange(seen.shape[-1], device=q.device)
        return request, seen & ~((keys == last[:, None]) & (row >= 16)[:, None])


class PaddedHeadDim(_Eager):
    """The last 32 dims of each head are lost."""

    def run(self, q: torch.Tensor, kv: _Cache, plan: KernelPlan) -> torch.Tensor:
        out = super().run(q, kv, plan)
        out.view(len(q), plan.layer.tp_q_head_num, -1)[..., 32:] = 0
        return out


class RoundsWeights(_Eager):
    """A result that is off by a little more than rounding."""

    def run(self, q: torch.Tensor, kv: _Cache, plan: KernelPlan) -> torch.Tensor:
        return (super().run(q, kv, plan).float() * (1 + 2**-6)).to(q.dtype)


class NeverRescales(_Eager):
    """What was summed before the maximum rose is not scaled down; tiles of 32 keys."""

    def run(self, q: torch.Tensor, kv: _Cache, plan: KernelPlan) -> torch.Tensor:
        request, seen = self.visible(q, plan)
        k, v = (cache[plan.page_table.long()].flatten(1, 2)[request].float() for cache in kv)
        rows = q.view(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        logits = torch.einsum("thgd,tshd->thgs", rows, k) * plan.layer.scaling
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        tiles = logits.split(32, -1)
        top = torch.stack([tile.amax(-1) for tile in tiles], -1).cummax(-1).values
        p = torch.cat([(tile - top[..., i, None]).exp() for i, tile in enumerate(tiles)], -1)
        p = p / p.sum(-1, keepdim=True)
        v = v.masked_fill(~seen[:, :, None, None], 0.0)
        return torch.einsum("thgs,tshd->thgd", p, v).flatten(1, 2).to(q.dtype)
