"""Of the thirteenth set one that slipped through its first run, and one that a case of an array caught by chance: each
has a case of its own now.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from plain_backends import Tiled, WithoutCausalMask, declared

from attn_testkit_corpus.faults.catalogue import bug, helper


@bug(
    "tt-metal #54413",
    "extend-gqa2x22-d16-bf16-p16-k0-n65a65-shuffled-gauss-layers1from0-b1prod",
    "writes-own-kv",
    of_a_tier="extend-gqa2x32-d16-bf16-p16-k3-n13a130-shuffled-gauss-b10prod",
)
class FillAcrossHeads(Tiled):
    """64 cores store blocks of 32 tokens of a head, a run of blocks each, and step forward from the first: where a run
    goes on into the next head, the rest lands behind the rows of the one before.
    """

    CORES, ROWS = 64, 32
    capabilities = declared(
        "extend",
        heads={"head_dims": {16}},
        kv_pool={"page_sizes": {16}},
        graph=(),
        server={"eager_without_waits": False},
    )

    @helper
    def blocks(self, heads, height):
        each, more = divmod(heads * height, self.CORES)
        first = 0
        for core in range(self.CORES):
            count = each + (core < more)
            for step in range(count):
                yield divmod(first + step, height), (first // height, first % height + step)
            first += count

    def write_kv(self, k, v, plan):
        stored = [torch.full_like(side, torch.nan) for side in (k, v)]
        ends = plan.cu_seqlens_q.tolist()
        for first, last in pairwise(ends):
            for (head, block), (to_head, to_block) in self.blocks(k.shape[1], -(-(last - first) // self.ROWS)):
                here, there = (torch.arange(self.ROWS) + first + at * self.ROWS for at in (block, to_block))
                kept = (here < last) & (there < last)
                for side, given in zip(stored, (k, v), strict=True):
                    side[there[kept], to_head] = given[here[kept], head]
        super().write_kv(*stored, plan)


@bug("jax #24495", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class KeysEndWithTheRowsTile(WithoutCausalMask):
    """Without a causal mask the loop over tiles of 128 keys ends where the tiles of rows do."""

    capabilities = declared("extend", options={"non_causal": {"extend"}})
    TILE = 128

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen if rows.layer.causal else seen & (index < (-(-rows.new // self.TILE) * self.TILE)[:, None])
