"""Weights, scales, partial results; bugs of the third set."""

from __future__ import annotations

import torch
from plain_backends import SMALLEST, Tiled
from third_parents import FP8, Latent, LatentLse, Workspace, mla_capabilities, wide_capabilities

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug


@bug(
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


@bug("ninfer-3090 #49", "decode-mha2-d64-bf16-p1-k32.128.64.16.63-interleaved-one_hot-kvfp8e4m3-b5prod")
class TileDequantisedBeforeItArrived(Tiled):
    """FP8 tiles are converted before all bytes are there: the last quarter is that of the tile before."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        if self.context.kv_pool.dtype.itemsize == 1:
            index = torch.arange(slots.shape[1], device=slots.device)
            late = (index >= 64) & (index % 64 >= 48)
            slots = slots[:, torch.where(late, index - 64, index)]
        return super().keys(kv, slots, plan)


@bug("aiter #4350", "decode-mla16-d512r64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "finite")
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


@bug("lmdeploy #4696", "decode-mha2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "finite")
class EmptySplitsRead(Tiled):
    """Splits without keys are read as they lie in scratch, with a weight of 0."""

    capabilities = wide_capabilities("decode", "extend")

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        if rows.plan.max_q_len > 1:
            return parts
        scratch = torch.empty_like(parts.acc)
        return parts._replace(acc=torch.where(torch.isinf(parts.peak)[..., None], scratch, parts.acc))


@bug("TensorRT-LLM #18754", "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-shifted-w46-b6small")
class StalePartials(Workspace):
    """Chunks outside the window are not written in a workspace that is kept, and are merged nevertheless."""

    def written(self, parts, rows):
        n = parts.peak.shape[-1]
        end = (torch.arange(n, device=parts.peak.device) + 1) * self.TILE
        return (end > self.window_start(rows)[:, None])[:, None].expand_as(parts.peak)


@bug("vllm-fork #275", "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod", "padding-inert", execution="graph")
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


@bug("aiter #5642", "extend-mha1-d64-bf16-p1-k9.70-n2a2x2-interleaved-gauss-kvfp8e4m3-b3prod")
class NormalisedBeforeFp8(Tiled):
    """Weights are divided by their sum before they are rounded to FP8: many become subnormal."""

    TILE = 256
    capabilities = wide_capabilities(
        "decode", "extend", kv_pool={"kv_dtypes": {"fp8_e4m3"}}, precision={"matmul_dtype": "fp8_e4m3"}
    )

    def weigh(self, p, v):
        total = p.sum(-1, keepdim=True).clamp(min=SMALLEST)
        return super().weigh((p / total).to(torch.float8_e4m3fn).float() * total, v)


@bug("tokenspeed #212", "decode-mla16-d512r64-bf16-p1-k5.0.1x2.70-shuffled-gauss-lsewhole-b6prod", "log-sum-exp")
class LseTileBeyondHeads(LatentLse):
    """Log-sum-exps are stored for 64 heads a row: with fewer heads, those of the next row are written over."""

    capabilities = mla_capabilities("decode", heads={"gqa_ratios": {16, 64}}, lse=LogSumExp(base="e", whole={"decode"}))

    def given_lse(self, lse, parts):
        t, h = lse.shape
        if h >= 64:
            return lse
        odd = (torch.arange(t, device=lse.device) % 2 == 1)[:, None]
        return lse.masked_fill(odd, 0.0)


@bug("llama.cpp #6438", "decode-mha2-d128-bf16-p16-k1500.70.9-contiguous-plus_minus_one-w700-b4prod", "finite")
class MaximumStartsAtMinusInfinity(Tiled):
    """The running maximum starts at minus infinity: a first tile without a visible key gives NaN."""

    capabilities = wide_capabilities("decode", "extend", windows={"decode", "extend"})

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        return out.masked_fill(torch.isinf(parts.peak[..., :1]), torch.nan), lse


@bug("1bit-MONSTER #393", "decode-gqa2x2-d64-bf16-p1-k0.1.8-interleaved-gauss-b3prod")
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


@bug("sgl-kernel-xpu #491", "decode-gqa4x2-d64-bf16-p1-k32.128.64.16.63-interleaved-one_hot-cap1.5-b5prod")
class SoftCapNotApplied(Tiled):
    """The cap of the logits is taken and never applied."""

    capabilities = wide_capabilities("decode", "extend", options={"logit_cap": True})

    def cap(self, scores, layer):
        return scores
