"""Backends that meet torch.compile for the first time in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_testkit.contract import KernelPlan
from attn_testkit.examples.minimal import MinimalBackend

_compiled: Callable[..., Any] | None = None


def _weights(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).nan_to_num()


class LazyCompile(MinimalBackend):
    """The softmax is compiled where it is first needed: nothing of the compiler is imported before."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        global _compiled
        if _compiled is None:
            _compiled = torch.compile(_weights)
        request, visible = self.visible(q, plan)
        k, v = (cache[plan.page_table.long()].flatten(1, 2)[request].float() for cache in kv)
        rows = q.view(len(q), plan.layer.tp_k_head_num, plan.layer.q_per_kv, -1).float()
        p = _compiled(torch.einsum("thgd,tshd->thgs", rows, k) * plan.layer.scaling, visible)
        v = v.masked_fill(~visible[:, :, None, None], 0.0)
        return torch.einsum("thgs,tshd->thgd", p, v).flatten(1, 2).to(q.dtype)
