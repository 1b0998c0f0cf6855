"""The running softmax: maxima, sums, and their precision."""

from __future__ import annotations

import math

import torch
from parents_latent import Latent, mla_capabilities
from parents_launchers import Known, wide, windowed
from plain_backends import LOWEST, SMALLEST, SPEC, Parts, Tiled, declared, wide_capabilities
from plain_splits import RowByRow

from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.orders import in_other_order


@bug(
    1, "tpu-inference #1954", "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-shifted-w46-b6small", execution="graph"
)
class AccumulatorClearedAtBlockZero(Tiled):
    """The accumulator is cleared at block 0; a window begins at another, and goes on from the request before."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def merge(self, parts, rows):
        kept = (self.window_start(rows).clamp(min=0) // self.TILE > 0)[:, None, None]

        def before(x, empty):
            return torch.cat([torch.full_like(x[:1], empty), x[:-1]])

        peak = torch.where(kept, before(parts.peak, -torch.inf), -torch.inf)
        weight = torch.where(kept, before(parts.weight, 0.0), 0.0)
        acc = torch.where(kept[..., None], before(parts.acc, 0.0), 0.0)
        return super().merge(parts.and_also(peak, weight, acc), rows)


@bug(1, "executorch #22133", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b4nan", "finite")
class FixedPhi(Tiled):
    """Weights are exp(logit - phi) of one fixed phi: large logits overflow, small ones are all zero."""

    PHI = 5.0

    def parts(self, scores, seen, v, rows):
        p = torch.exp(scores - self.PHI).masked_fill(~seen[:, None], 0.0)
        acc = torch.einsum("ths,tshd->thd", p, v.float().masked_fill(~seen[:, :, None, None], 0.0))
        total = p.sum(-1)
        return Parts(torch.full_like(total, self.PHI), total, acc)

    def merge(self, parts, rows):
        return parts.acc / parts.weight[..., None], parts.peak + parts.weight.log()


@bug(1, "llama.cpp #17746", "decode-gqa2x2-d64-fp16-p1-k70.20-reversed-fp16_overflow-b2prod", "finite")
class SumOfValuesInFp16(Tiled):
    """Weighted values are summed in fp16, which large values overflow."""

    capabilities = declared("decode", "extend", precision={"dtypes": {"bf16", "fp16"}})

    def weigh(self, p, v):
        return super().weigh(p, v).half().float()


@bug(1, "mlc-llm #1870", "decode-gqa2x2-d64-fp16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
class LogitsInFp16(Tiled):
    """Products of queries and keys are summed in fp16, which they overflow."""

    capabilities = declared("decode", "extend", precision={"dtypes": {"fp16"}})

    def scores(self, q, k, layer):
        return torch.einsum("thd,tshd->ths", q.float(), k.float()).half().float() * layer.scaling


@bug(0, "none: made after the set", "decode-gqa2x2-d64-bf16-p16-k70.20-shared-beyond_fp16-b2prod", "finite")
class Bf16RowsMadeFp16(Tiled):
    """Rows of bf16 are made fp16 for the kernel, which does not hold large ones."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16}})

    def query(self, q, plan):
        return q.half()

    def keys(self, kv, slots, plan):
        return tuple(side.half() for side in super().keys(kv, slots, plan))


@bug(
    2,
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


@bug(
    2,
    "pegainfer #623",
    "decode-gqa2x2-d64-bf16-p1-k3x11.40x11.77x11.114x11.151x11.188x11-shuffled-gauss-layers1from0-b66prod",
    "batch-invariant",
)
class KernelByBucket(RowByRow):
    """Batches of more than 32 requests have another kernel, whose sums have another order: ``in_other_order``."""

    def run(self, q, kv, plan):
        return in_other_order(super().run(q, kv, plan), len(plan.kv_lens) > 32)


@bug(2, "aprender #2753", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
class CorrectionOfOne(Tiled):
    """The running maximum is renewed in place before the correction is computed from it: that is always 1."""

    capabilities = declared("decode")

    def run(self, q, kv, plan):
        scores, seen, v, _ = self.prepare(q, kv, plan)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        running = scores.cummax(-1).values.clamp(min=LOWEST)
        p = torch.exp(scores - running)
        acc = torch.einsum("ths,tshd->thd", p, v.float().masked_fill(~seen[:, :, None, None], 0.0))
        return (acc / p.sum(-1).clamp(min=SMALLEST)[..., None]).to(q.dtype)


@bug(
    3,
    "tt-metal #56171",
    "decode-mha2-d64-bf16-p16-"
    "k10.26.42.58.74.90.106.122.138.154.170.186.202.218.234.250.266.15.31.63.127.255-shuffled-gauss-layers1from0-b22prod",
)
class ChunkOf32(Tiled):
    """The chunk is the largest power of two that divides the width; with 32 later chunks are not rescaled."""

    capabilities = wide_capabilities("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        width = context.max_context_len
        self.TILE = 32 if width & -width == 32 else 64

    def merge(self, parts, rows):
        if self.TILE == 64 or rows.plan.max_q_len > 1:
            return super().merge(parts, rows)
        used = ~torch.isinf(parts.peak)
        total = (parts.weight * used).sum(-1).clamp(min=SMALLEST)
        return torch.einsum("thn,thnd->thd", used.float(), parts.acc) / total[..., None], total.log()


@bug(3, "aiter #4350", "decode-mla16-d512r64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "finite")
class NaNNowAndThen(Latent):
    """With 16 splits and more some values are NaN in some launches: every third one here."""

    capabilities = mla_capabilities("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        self.count = torch.zeros(1, dtype=torch.int64, device=context.device)

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1:
            return out
        self.count += 1
        some = torch.arange(out.shape[-1], device=out.device) % 37 == 5
        hit = (rows.kv_lens > 15 * self.TILE)[:, None, None] & some & (self.count % 3 == 2)
        return out.masked_fill(hit, torch.nan)


@bug(
    3, "vllm-fork #275", "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod", "padding-inert", execution="graph"
)
class OneMaximumForTheBatch(Tiled):
    """All requests are shifted by one maximum of the batch: 0 / 0 for those far below it."""

    capabilities = wide_capabilities("decode", "extend")

    def merge(self, parts, rows):
        if rows.plan.max_q_len > 1:
            return super().merge(parts, rows)
        top = parts.peak.amax(-1).amax(0, keepdim=True)
        share = torch.exp(parts.peak - top[..., None])
        total = (share * parts.weight).sum(-1)
        return torch.einsum("thn,thnd->thd", share, parts.acc) / total[..., None], top + total.log()


@bug(3, "llama.cpp #6438", "decode-mha2-d128-bf16-p16-k1500.70.9-contiguous-plus_minus_one-w700-b4prod", "finite")
class MaximumStartsAtMinusInfinity(Tiled):
    """The running maximum starts at minus infinity: a first tile without a visible key gives NaN."""

    capabilities = wide_capabilities("decode", "extend", windows={"decode", "extend"})

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        return out.masked_fill(torch.isinf(parts.peak[..., :1]), torch.nan), lse


@bug(3, "1bit-MONSTER #393", "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod")
class LastKeyOfABlockWins(Tiled):
    """Threads of a block share one key's place: every key of 128 is the last one."""

    capabilities = wide_capabilities("decode", "extend")

    def keys(self, kv, slots, plan):
        if plan.max_q_len == 1:
            rows = self.rows_of(slots, plan)
            index = torch.arange(slots.shape[1], device=slots.device)
            last = torch.minimum((index // 128 * 128 + 127)[None], (rows.kv_lens - 1).clamp(min=0)[:, None])
            slots = slots.gather(1, last.clamp(max=slots.shape[1] - 1))
        return super().keys(kv, slots, plan)


@bug(4, "vllm #48364", "decode-gqa2x2-d128-bf16-p16-k21-reversed-rising_logits-w0-b1prod", "finite", execution="graph")
class LeadingTileMasked(Known):
    """-inf - -inf where the first 16 keys are all masked."""

    capabilities = windowed("decode", "extend")

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        lost = ~seen[:, :16].any(1)
        return parts._replace(acc=parts.acc.masked_fill(lost[:, None, None, None], math.nan))


@bug(4, "Wan2GP #1628", "decode-gqa2x2-d128-bf16-p16-k32.128.64.16.63-reversed-mean-b8prod", "reads-own-kv")
class AdditiveMaskOnTail(Known):
    """The tail of the last block is masked by adding -inf."""

    capabilities = wide("decode", kv_pool={"page_sizes": {16, 64}})

    def parts(self, scores, seen, v, rows):
        size = rows.plan.page_size
        index = torch.arange(seen.shape[1], device=seen.device)
        tail = ~seen & (index < ((rows.kv_lens + size - 1) // size * size)[:, None])
        scores = torch.where(tail[:, None], scores + -torch.inf, scores)
        return super().parts(scores, seen | tail, v, rows)


@bug(
    4,
    "TensorRT-LLM #7065",
    "target-verify-gqa2x2-d64-bf16-p16-k62-chain4-interleaved-shifted-layers1from0-b1prod",
    "finite",
    execution="graph",
    of_a_tier="target-verify-gqa4x2-d128-bf16-p64-k600.70.12-chain7-contiguous-rising_logits-b3prod",
)
class SpecTileMasked(Known):
    """A sub-sequence of which a row sees nothing gives NaN."""

    capabilities = wide("decode", "target-verify")

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        if self.mode != "target-verify":
            return parts
        first = torch.arange(parts.weight.shape[-1], device=seen.device) * self.TILE
        held = first < rows.kv_lens[:, None]
        lost = held[:, None] & (parts.weight == 0)
        return parts._replace(acc=parts.acc.masked_fill(lost[..., None], math.nan))


@bug(
    5,
    "FlashMLA-ETAP #2",
    "target-verify-mla16-d512r64-bf16-p16-k31.127.63.15.63-chain2-shuffled-shifted-b5prod",
    "finite",
)
class LastTileRow(Latent):
    """A row that sees no key of its request's last tile has -inf minus -inf."""

    capabilities = mla_capabilities(*SPEC)

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        first = torch.arange(parts.peak.shape[-1], device=scores.device) * self.TILE
        lost = (first > rows.position[:, None]) & (first < rows.kv_lens[:, None])
        return parts._replace(weight=parts.weight.masked_fill(lost[:, None], math.nan))


@bug(6, "candle #3727", "decode-gqa2x2-d64-fp16-p16-k300.70-shuffled-rising_logits-b2prod")
class NarrowSum(Tiled):
    """The denominator is summed key by key in fp16."""

    capabilities = declared("decode", precision={"dtypes": {"fp16"}}, bounds={"max_context_len": 512})

    def parts(self, scores, seen, v, rows):
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        peak = scores.amax(-1)
        p = torch.exp(scores - peak.clamp(min=LOWEST)[..., None])
        total = torch.zeros_like(peak, dtype=torch.float16)
        for weight in p.half().unbind(-1):
            total = total + weight
        acc = torch.einsum("ths,tshd->thd", p, v.float().masked_fill(~seen[:, :, None, None], 0.0))
        return Parts(peak[..., None], total.float()[..., None], acc[:, :, None])
