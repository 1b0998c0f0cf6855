"""Class G: head groups that are larger than a tile of heads."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .dense import DenseBackend


@fault("vLLM #40792 (review); FreeToken #177", "matches-oracle", "head mapping")
class HeadTilesStraddleGroups(DenseBackend):
    """Heads are walked in tiles of 16, and a tile past a group's last whole one reaches into the next group."""

    tile = 16

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        head, group = torch.arange(layer.tp_q_head_num, device=q.device), layer.q_per_kv
        taken = head // self.tile // (-(-group // self.tile))
        if group <= self.tile or layer.tp_k_head_num == 1:
            return out
        # Head h's result over KV head ``taken[h]``: run again with the queries moved into that group.
        for shift in range(1, layer.tp_k_head_num):
            moved = super().forward(q.roll(-shift * group, 1), k, v, layer, batch, save_kv_cache=False)
            wrong = (head // group - taken) % layer.tp_k_head_num == shift
            out = torch.where(wrong[:, None], moved.roll(shift * group, 1), out)
        return out
