"""Scales, caps, sinks, sums and merges; bugs of the sixth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fifth_parents_split import SplitKV
from fifth_parents_work import LOG2E, WorkList
from plain_backends import LOWEST, Parts, Tiled, declared
from third_parents import FP8

from attn_testkit_corpus.faults.catalogue import bug


@bug("vllm #27491", "decode-mqa5-d64-bf16-p1-k5.0.1x2.70-contiguous-gauss-lsepages3merged-b6prod", "log-sum-exp")
class MergeTwoEmpty(WorkList):
    """The merge of two parts without keys takes -inf from -inf: NaN."""

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        top = torch.maximum(lse_a, lse_b)
        a, b = torch.exp2(lse_a - top), torch.exp2(lse_b - top)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / (a + b)[..., None]
        return out.to(out_a.dtype), top + torch.log2(a + b)


@bug("sglang #26852", "decode-gqa2x2-d64-bf16-p16-k15.16.17-interleaved-gauss-kvfp8e4m3-b3prod")
class VScaleFallsToK(Tiled):
    """The scale of V falls back to that of K."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, v_scale=plan.layer.k_scale)))


@bug("imp #1303", "draft-extend-mqa4-d128-bf16-p16-k1.2.5.9.14.2.30-n2a1x7-shared-shifted-cap1.5-sink-b8small")
class SinkOnlyInSplit(SplitKV):
    """Rows of 32 keys at most, which are not split, have no sink in their denominator."""

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        if rows.layer.sinks is None:
            return out, lse
        without = replace(rows, plan=replace(rows.plan, layer=replace(rows.layer, sinks=None)))
        single = rows.kv_lens <= self.TILE
        return torch.where(single[:, None, None], super().merge(parts, without)[0], out), lse


@bug("sglang #33926", "decode-mqa5-d64-bf16-p16-k35.0.16.1.70-contiguous-gauss-lsewhole-b6prod", "log-sum-exp")
class LseRebasedTwice(WorkList):
    """A log-sum-exp that has base 2 already is multiplied by log2(e) once more."""

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        out, lse = super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)
        return out, lse * LOG2E


@bug("vllm-metal #665", "decode-gqa2x2-d64-bf16-p1-k0.1.8-contiguous-mean-cap1.5-b6stale")
class SoftcapZero(Tiled):
    """The soft cap that the kernel is given is the constant 0."""

    capabilities = declared("decode", "extend", options={"logit_cap": True})

    def cap(self, scores, layer):
        return scores


@bug("candle #3727", "decode-gqa2x2-d64-fp16-p16-k300.70-shuffled-rising_logits-b2prod")
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


@bug("vllm #48016", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n6a9.7.1-chunks3-shared-negative-kvfp8e4m3-b4small")
class ScalesTwice(Tiled):
    """Prefill dequantises K and V by their scales, and gives the scales to the kernel again."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        k, v = super().keys(kv, slots, plan)
        if plan.max_q_len == 1:
            return k, v
        return k.float() * plan.layer.k_scale, v.float() * plan.layer.v_scale


@bug("sglang #24198", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n6a9.7.1-chunks3-shared-negative-kvfp8e4m3-b4small")
class PagedPartNoScales(Tiled):
    """Of the two calls of a prefill, that for the prefix has no scales."""

    capabilities = declared("extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        k, v = (side.float() for side in super().keys(kv, slots, plan))
        rows = self.rows_of(slots, plan)
        index = torch.arange(slots.shape[1], device=slots.device)
        cached = (index < rows.prefix[:, None])[..., None, None]
        return torch.where(cached, k / plan.layer.k_scale, k), torch.where(cached, v / plan.layer.v_scale, v)


@bug("onnx #7865", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n5a1x2.11-chunks3-shared-negative-w4000-cap1.5-b6prod")
class MaskThenCap(Tiled):
    """The soft cap comes after the mask: minus infinity becomes minus the cap, and takes weight."""

    capabilities = declared("decode", "extend", options={"logit_cap": True}, windows={"decode", "extend"})

    def parts(self, scores, seen, v, rows):
        cap = rows.layer.logit_cap
        if not cap:
            return super().parts(scores, seen, v, rows)
        there = torch.arange(seen.shape[1], device=seen.device) < rows.kv_lens[:, None]
        return super().parts(scores.masked_fill(~seen[:, None], -cap), there, v, rows)
