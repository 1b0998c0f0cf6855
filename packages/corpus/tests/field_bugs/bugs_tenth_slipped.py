"""Bugs of the tenth set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from fifth_parents_varlen import Varlen
from plain_backends import LOWEST, SMALLEST, Tiled, declared
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "onnxruntime #28409",
    "extend-gqa2x2-d64-bf16-p16-k3-n22a66-shuffled-gauss-layers1from0-b3prod",
    "replay-follows-batch",
    execution="graph",
    of_a_tier="extend-gqa2x32-d64-bf16-p16-k3-n13a130-shuffled-gauss-b10prod",
)
class OrtMaxQueryLen(Tiled):
    """Blocks of 64 rows for as many as the longest request has where each request has a row."""

    capabilities = declared("extend", kv_pool={"page_sizes": {16}})

    def finish(self, out, rows):
        longest = len(out) - len(rows.plan.kv_lens) + 1
        done = rows.place < -(-longest // 64) * 64
        return torch.where(done[:, None, None], out, torch.empty_like(out))


@bug("mlx #4431", "decode-gqa8x2-d64-bf16-p16-k1151x3-shuffled-gauss-layers1from0-b4prod")
class MlxBatchOffset(Tiled):
    """Eight heads a KV head, 1,024 keys and more, no mask because all are as long: all read the first one's keys."""

    capabilities = declared("decode", heads={"gqa_ratios": {4, 8}}, kv_pool={"page_sizes": {16}})

    def keys(self, kv, slots, plan):
        lens = plan.kv_lens
        if plan.layer.q_per_kv >= 8:
            two_passes = (lens == lens[0]).all() & (lens[0] >= 1024)
            slots = torch.where(two_passes, slots[:1], slots)
        return super().keys(kv, slots, plan)


@bug("vllm-ascend #5397", "extend-mha2-d64-bf16-p16-k0x3-n20a20x3-shuffled-gauss-b4prod-padded_tokens", "completes")
class AscendMhaPadding(Varlen):
    """Where no request has a prefix, K and V are the new rows, and there may be no more of them than lengths say."""

    capabilities = declared(
        "decode",
        "extend",
        graph=("decode",),
        heads={"families": {"mha"}, "gqa_ratios": {1}},
        kv_pool={"page_sizes": {16}},
        server={"takes_more_rows": True},
    )
    lengths = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        fresh = batch.forward_mode == "extend" and not any(batch.extend_prefix_lens_cpu)
        self.lengths = sum(batch.extend_seq_lens_cpu) if fresh else None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.lengths = None

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if save_kv_cache and self.lengths is not None and len(k) != self.lengths:
            raise RuntimeError(f"keyT({len(k)}) must be equal to the last of actualSequenceLengthKV({self.lengths})")
        return super().forward(q, k, v, layer, batch, save_kv_cache)


@bug(
    "flash-attention #2752",
    "decode-gqa2x2-d64-bf16-p16-k35.0.16.1.70-shared-negative-sink-lsepages2merged-b6prod",
    "log-sum-exp",
)
class SinkOutsideMax(WithKVSplits):
    """exp(sink - max), with the maximum of the keys alone: infinite, or NaN where there are no keys."""

    capabilities = declared(
        "decode",
        "extend",
        kv_pool={"page_sizes": {16}},
        options={"sinks": True},
        lse=LogSumExp(base="e", whole={"decode", "extend"}, prefix={"extend"}, pages={"decode"}, merges=True),
    )

    def merge(self, parts, rows):
        if rows.layer.sinks is None:
            return super().merge(parts, rows)
        top = parts.peak.amax(-1)
        share = torch.exp(parts.peak - top.clamp(min=LOWEST)[..., None])
        total = (share * parts.weight).sum(-1) + torch.exp(self.sink_of(rows) - top)
        out = torch.einsum("thn,thnd->thd", share, parts.acc) / total.clamp(min=SMALLEST)[..., None]
        return out, top + total.log()
