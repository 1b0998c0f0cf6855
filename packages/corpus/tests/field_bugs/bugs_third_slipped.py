"""Bugs of the third set that its first runs missed. Their cases were added later."""

from __future__ import annotations

import torch
from plain_backends import Tiled, declared
from third_parents import FP8, wide_capabilities

from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.orders import in_other_order


@bug(
    "sparkinfer #330, sparkinfer #425",
    "decode-gqa4x2-d256-bf16-p16-k1025.33-shuffled-gauss-kvfp8e4m3-layers1from0-b2prod",
)
class HardCoded128(Tiled):
    """The FP8 decode of long contexts has a head dim of 128 built in: of 256, the second half is not computed."""

    capabilities = wide_capabilities(
        "decode",
        "extend",
        heads={"head_dims": {128, 256}, "gqa_ratios": {4, 8}},
        kv_pool={"page_sizes": {16, 64}, "kv_dtypes": FP8},
    )

    def finish(self, out, rows):
        plan = rows.plan
        if plan.max_q_len > 1 or plan.page_size != 16 or self.context.kv_pool.dtype.itemsize > 1:
            return out
        long = rows.kv_lens >= 16 * 32
        far = torch.arange(out.shape[-1], device=out.device) >= 128
        return out.masked_fill(long[:, None, None] & far, 0.0)


@bug("llama.cpp #22286", "decode-gqa32x2-d64-bf16-p16-k70.33.1-shuffled-gauss-sink-b3prod")
class SinksOfSixteenHeads(Tiled):
    """Both groups of warps that share 32 heads read the sinks of the first 16."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {4, 32}}, options={"sinks": True})

    def sink_of(self, rows):
        sinks = rows.layer.sinks.float()
        head = torch.arange(len(sinks), device=sinks.device)
        if rows.layer.q_per_kv == 32:
            head = head // 32 * 32 + head % 16
        return sinks[head][None].expand(len(rows.request), -1)


@bug(
    "xserv 5b350ee",
    "decode-gqa4x2-d128-bf16-p16-k600.513-shuffled-gauss-layers1from0-b2prod",
    "repeatable",
    of_a_tier="decode-gqa4x8-d128-bf16-p16-k600.513.700.431.600.513.700.431.600.513.700.431-shuffled-gauss-layers1from0"
    "-b12prod",
)
class MergedByAtomics(Tiled):
    """Partial results are added in the order in which they arrive, though determinism is declared.

    The bits of every other call are other ones on each processor: ``in_other_order``.
    """

    capabilities = wide_capabilities("decode", "extend", promises={"deterministic": True})

    def __init__(self, context):
        super().__init__(context)
        self.count = torch.zeros(1, dtype=torch.int64, device=context.device)

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1:
            return out
        self.count += rows.layer.layer_id == self.context.layers[0].layer_id
        return in_other_order(out, self.count % 2 == 0)
