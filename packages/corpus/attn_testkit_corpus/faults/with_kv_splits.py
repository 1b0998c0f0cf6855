"""A healthy parent that attends to KV splits, for bugs of log-sum-exps and of merging.

Each property of a split is one small method: its keys, its sinks, its logits, its sum, and the form in which the
log-sum-exp is returned. Shapes as in ``dense.py``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode, KVSplit, LogSumExp

from .dense import DenseBackend

MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}
NATURAL = LogSumExp(base="e", whole=MODES, prefix=MODES, pages=MODES, tokens=MODES, merges=True)


class SplitKVBackend(DenseBackend):
    """Healthy parent: all rows of a request against all its keys, except those outside the split."""

    capabilities = DenseBackend.capabilities.with_changes(
        heads={"families": {"gqa"}, "head_dims": {64}, "gqa_ratios": {2}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {4, 16}},
        bounds={"max_q_rows": 8, "max_topk": 2, "max_context_len": 1 << 13},
        lse=NATURAL,
    )
    part: KVSplit
    """The split that is attended."""

    @override
    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        part: KVSplit,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, Hq, Dv] in q's dtype and ``returned`` of [T, Hq] float32. Shapes of the rest as in ``forward``."""
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        self.part = part
        layer = self.layer_of_part(layer)
        seen = self.in_window(layer) & self.held(self.prefix_lens())[:, None]
        logits = self.logits(self.queries(q, layer), self.keys(layer), layer)
        out = self.weighted_sum(self.weights(logits, seen, layer), self.values(layer), seen) * layer.v_scale
        out = self.outputs(out, seen).reshape(-1, layer.tp_q_head_num, layer.v_head_dim)[self.place].to(q.dtype)
        lse = self.log_sum_exp(logits.masked_fill(~seen[:, None, None], -torch.inf), layer).permute(0, 3, 1, 2)
        return out, self.returned(lse.reshape(-1, layer.tp_q_head_num)[self.place])

    def prefix_lens(self) -> torch.Tensor:
        """[B] int64: keys before the step."""
        return (self.kv_lens - self.counts).clamp(min=0)

    def held(self, prefix_lens: torch.Tensor) -> torch.Tensor:
        """[B, C] bool: True for keys of the split."""
        return self.part.holds(self.key, prefix_lens[:, None])

    def layer_of_part(self, layer: AttentionLayer) -> AttentionLayer:
        """The layer with its sinks, if they count in this split."""
        return layer if self.part.sinks else replace(layer, sinks=None)

    def outputs(self, out: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[B, W, Hk, G, Dv]: output of the split, zero for rows without ``seen`` [B, W, C] keys."""
        return out

    def log_sum_exp(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W] of ``logits`` [B, Hk, G, W, C], -inf for keys that are not seen."""
        return torch.logsumexp(self.with_sinks(logits, layer), -1)

    def with_sinks(self, logits: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[B, Hk, G, W, C or C + 1]: one more logit if there are sinks."""
        if layer.sinks is None:
            return logits
        sinks = layer.sinks.view(1, layer.tp_k_head_num, layer.q_per_kv, 1, 1)
        return torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        """``lse`` [T, Hq] float32, natural, in the declared form."""
        return lse

    @override
    def merge_state(
        self, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge by shares of the whole sum, in the order a, b; -inf and zeros if both are empty."""
        top = torch.maximum(lse_a, lse_b)
        top = torch.where(top == -torch.inf, 0.0, top)
        weight_a, weight_b = self.weight(lse_a, top), self.weight(lse_b, top)
        total = weight_a + weight_b
        sums = weight_a[..., None] * out_a.float() + weight_b[..., None] * out_b.float()
        out = sums / torch.where(total == 0, 1.0, total)[..., None]
        return out.to(out_a.dtype), self.merged_lse(top, total)

    def weight(self, lse: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """[T, Hq]: weight of a split, relative to the largest."""
        return torch.exp(lse - top)

    def merged_lse(self, top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """[T, Hq]: log-sum-exp of both splits; ``total`` is the sum of their weights."""
        return top + total.log()
