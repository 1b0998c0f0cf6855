"""Bugs of the second set that slipped through its first runs, with cases and looks that there were not then."""

from __future__ import annotations

import torch
from plain_backends import Planned, Tiled, WithLse, declared
from plain_splits import RowByRow, WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.orders import in_other_order


@bug(
    "aiter #3267",
    "decode-mla32-d512r64-bf16-p1-k9-shuffled-gauss-layers1from0-lsewhole-b1prod",
    "log-sum-exp",
    of_a_tier="decode-mla128-d512r64-bf16-p1-k130.5.40-contiguous-gauss-lsewhole-b4prod",
)
class LseOfFoldedHeads(WithLse):
    """More than 16 heads are folded to 16, and the log-sum-exp of the fold is given."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {16, 32, 128}, "head_dims": {512}},
        lse=LogSumExp(base="e", whole={"decode"}),
    )

    def given_lse(self, lse, parts):
        return lse[:, torch.arange(lse.shape[1], device=lse.device) % 16]


@bug(
    "tokenspeed #1185",
    "decode-mla128-d512r64-bf16-p16-k20-interleaved-gauss-layers1from0-lsepages2merged-b1prod",
    "completes",
    of_a_tier="decode-mla128-d512r64-bf16-p16-k130.5.40-shared-gauss-lsepages2merged-b4prod",
)
class MergeLaunchOverCap(WithKVSplits):
    """The merge has a thread for each head and lane in one block, which takes 1024."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {16, 128}, "head_dims": {512}},
        kv_pool={"page_sizes": {16}},
        lse=LogSumExp(base="e", pages={"decode"}, merges=True),
    )

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        if out_a.shape[1] * 32 > 1024:
            raise RuntimeError("merge_state launch failed: invalid argument")
        return super().merge_state(out_a, lse_a, out_b, lse_b)


@bug(
    "vLLM #50781",
    "extend-gqa2x32-d64-bf16-p1-k3-n4a4-interleaved-gauss-layers1from0-lsewhole-b1prod",
    "completes",
    of_a_tier="extend-gqa2x32-d64-bf16-p1-k70.5.40-n36a70.1.35-reversed-gauss-lsewhole-b3prod",
)
class StatsBeyondWorkspace(WithLse):
    """Statistics of returned log-sum-exps come from a workspace of fixed size, 1000 times smaller here."""

    def run_return_lse(self, q, kv, plan):
        if q.shape[0] * q.shape[1] * 8 * 256 > 413_138:
            raise RuntimeError("Buffer overflow when allocating memory for the softmax statistics")
        return super().run_return_lse(q, kv, plan)


@bug(
    "ATOM #2211",
    "decode-gqa16x2-d64-bf16-p16-k10.250.266-interleaved-gauss-kvfp8e4m3-layers1from0-b3prod",
    "finite",
    of_a_tier="decode-gqa16x2-d64-bf16-p16-"
    "k10.26.42.58.74.90.106.122.138.154.170.186.202.218.234.250.266.15.31.63.127.255-shared-gauss-kvfp8e4m3-layers1from0-b22prod",
)
class NaNAtSixteenPages(Tiled):
    """FP8 and groups of 16: 0 / 0 where a request has 16 pages, the last one not full."""

    capabilities = declared(
        "decode", heads={"gqa_ratios": {8, 16}}, kv_pool={"kv_dtypes": {"fp8_e4m3"}, "page_sizes": {16}}
    )

    def finish(self, out, rows):
        keys = rows.kv_lens
        hit = ((keys + 15) // 16 == 16) & (keys % 16 > 0) & (rows.layer.q_per_kv == 16)
        return out.masked_fill(hit[:, None, None], torch.nan)


@bug("sglang #23498", "extend-gqa2x2-d64-bf16-p1-k13-n17a17-chunks3-shuffled-gauss-b1prod", "completes")
class ViewOfStridedRows(Tiled):
    """The cache writer flattens rows by ``view``."""

    capabilities = declared("decode", "extend")

    def write_kv(self, k, v, plan):
        shape = k.shape
        width = shape[1] * shape[2]
        super().write_kv(k.view(-1, width).view(shape), v.view(-1, width).view(shape), plan)


@bug("sglang #28034", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale", "completes")
class PlanOnASideStream(Planned):
    """Lists are made on a stream of their own, which waits for nobody and for which nobody waits."""

    def __init__(self, context):
        super().__init__(context)
        self.side = torch.cuda.Stream()

    def lists(self, batch):
        with torch.cuda.stream(self.side):
            return super().lists(batch)


@bug(
    "pegainfer #623",
    "decode-gqa2x2-d64-bf16-p1-k3x11.40x11.77x11.114x11.151x11.188x11-shuffled-gauss-layers1from0-b66prod",
    "batch-invariant",
)
class KernelByBucket(RowByRow):
    """Batches of more than 32 requests have another kernel, whose sums have another order: ``in_other_order``."""

    def run(self, q, kv, plan):
        return in_other_order(super().run(q, kv, plan), len(plan.kv_lens) > 32)
