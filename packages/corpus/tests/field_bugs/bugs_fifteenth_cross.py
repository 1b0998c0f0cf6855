"""Cross attention; a bug of the fifteenth set."""

from __future__ import annotations

import torch

from attn_testkit.contract import CrossAttention
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.dense import DenseBackend


class Crossing(DenseBackend):
    """The reference parent with cross-attention layers, whose keys have the first columns of the request table."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"decode", "extend"},
        graph={"decode"},
        heads={"families": {"gqa"}, "gqa_ratios": {2, 4}, "head_dims": {64, 128}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16, 64}},
        options={"sinks": False, "logit_cap": False},
        bounds={"max_topk": 0},
        cross_attention=CrossAttention(modes={"decode", "extend"}),
    )

    def __init__(self, context):
        super().__init__(context)
        self.key = torch.arange(context.req_to_token.shape[1], device=context.device)

    def key_slots(self, batch):
        table = super().key_slots(batch)
        self.encoder_slots, self.encoder_lens = table, None
        if batch.encoder_lens is None:
            return table
        self.encoder_lens = batch.encoder_lens[: batch.batch_size].long()
        return table.gather(1, (self.key + self.encoder_lens[:, None]).clamp(max=table.shape[1] - 1))

    def encoder_keys_seen(self):
        """[B, 1 or W, C] bool."""
        return (self.key < self.encoder_lens[:, None])[:, None]

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if not layer.is_cross_attention:
            return super().forward(q, k, v, layer, batch, save_kv_cache)
        if k is not None:
            self.context.kv_pool.set_kv_buffer(layer, batch.encoder_out_cache_loc, k, v)
        slots, visible = self.slots, self.visible
        self.slots, self.visible = self.encoder_slots, self.encoder_keys_seen().expand_as(visible)
        out = super().forward(q, k, v, layer, batch, False)
        self.slots, self.visible = slots, visible
        return out


@bug("vllm #47035", "extend-gqa2x2-d64-bf16-p16-k7x2.8x29.608.8x8-n3a2.3x20.2x19-shuffled-one_hot-cross37-b41small")
class CausalCross(Crossing):
    """Cross attention runs in a kernel that is causal only, aligned at the end."""

    def encoder_keys_seen(self):
        row = torch.arange(self.visible.shape[1], device=self.key.device)
        last = self.encoder_lens[:, None] - self.counts[:, None] + row
        return super().encoder_keys_seen() & (self.key <= last[..., None])
