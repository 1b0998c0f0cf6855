"""Bugs of the eleventh set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from plain_backends import WithoutCausalMask, declared
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "sglang #39703",
    "extend-gqa2x2-d64-bf16-p16-k0.1.16-n45a3.131.1-interleaved-one_hot-layers1from0-b3prod-empty_batches-noncausal",
)
class CausalTileBound(WithoutCausalMask):
    """The loop over keys ends at the diagonal of a tile of 64 rows, in layers that are not causal as well."""

    capabilities = declared("extend", kv_pool={"page_sizes": {16}}, options={"non_causal": {"extend"}})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        end = rows.prefix + (rows.place // 64 + 1) * 64
        return seen if rows.layer.causal else seen & (index < end[:, None])


@bug(
    "aotriton #235",
    "extend-gqa2x2-d64-bf16-p16-k0.35.0.16.1.70.33.9.17-n2a2.1.2.1.2.1.2.1.2-reversed-gauss-lseprefix-b10prod",
    "log-sum-exp",
)
class PersistentSkips(WithKVSplits):
    """Four workgroups take tiles of 16 rows by turns. One that meets a tile without keys ends, and its later tiles are
    not written.
    """

    TILE_ROWS, WORKGROUPS = 16, 4
    capabilities = declared(
        "extend", kv_pool={"page_sizes": {16}}, lse=LogSumExp(base="e", whole={"extend"}, prefix={"extend"})
    )

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        tiles = -(-plan.cu_seqlens_q.diff() // self.TILE_ROWS)
        ends = tiles.cumsum(0)
        request = torch.searchsorted(ends, torch.arange(len(q), device=q.device), right=True).clamp(max=len(tiles) - 1)
        empty = plan.part_lens[request] == 0
        lost = torch.zeros_like(empty)
        for group in range(self.WORKGROUPS):
            lost[group :: self.WORKGROUPS] = empty[group :: self.WORKGROUPS].cumsum(0) > 0
        rows = self.rows_of(q, plan)
        tile = (ends - tiles)[rows.request] + rows.place // self.TILE_ROWS
        gone = lost[tile]
        return out.masked_fill(gone[:, None, None], 0.0), lse.masked_fill(gone[:, None], -torch.inf)
