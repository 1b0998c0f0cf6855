"""Weights, scales, sinks, partial results; bugs of the fourth set."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from fourth_parents import FP8, Known, wide, windowed
from plain_backends import WithoutCausalMask, declared
from plain_splits import WithKVSplits
from third_parents import Latent, Workspace, mla_capabilities

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug


@bug("vllm #48364", "decode-gqa2x2-d128-bf16-p16-k21-reversed-rising_logits-w0-b1prod", "finite", execution="graph")
class LeadingTileMasked(Known):
    """-inf - -inf where the first 16 keys are all masked."""

    capabilities = windowed("decode", "extend")

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        lost = ~seen[:, :16].any(1)
        return parts._replace(acc=parts.acc.masked_fill(lost[:, None, None, None], math.nan))


@bug("aiter #4420", "decode-mla16-d512r64-bf16-p64-k300.70-interleaved-rising_logits-b2nan", "finite")
class EmptySplitNaN(Latent):
    """A split without keys is NaN; splits are planned for the batch's longest request."""

    capabilities = mla_capabilities("decode", kv_pool={"kv_dtypes": FP8})

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        tiles = (rows.plan.kv_lens.long() + 15) // 16
        each = (tiles.max() + 3) // 4
        used = (tiles.max() + each - 1) // each
        lost = (tiles[rows.request] <= (used - 1) * each) & (used > 1)
        return parts._replace(acc=parts.acc.masked_fill(lost[:, None, None, None], math.nan))


@bug(
    "imp #1346",
    "extend-gqa2x2-d128-bf16-p1-k30.7-n4a4.1-shuffled-shifted-kvfp8e4m3-sink-layers1from0-b2prod",
    of_a_tier="extend-gqa4x2-d128-bf16-p1-k32.128.64.16.63-n26a17.64.33.15.1-chunks3-"
    "shared-one_hot-kvfp8e4m3-sink-b5prod",
)
class SinksLostWithFp8(Known):
    """The shared reduction is given no sinks with FP8."""

    capabilities = wide("decode", "extend", kv_pool={"kv_dtypes": FP8}, options={"sinks": True})

    def run(self, q, kv, plan):
        if kv[0].dtype == torch.float8_e4m3fn:
            plan = replace(plan, layer=replace(plan.layer, sinks=None))
        return super().run(q, kv, plan)


@bug(
    "imp #688",
    "extend-gqa4x2-d64-bf16-p64-k9-n5a5-interleaved-rising_logits-cap1.5-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1500.70-n5a5.1-reversed-gauss-cap1.5-b3prod",
)
class CapLostInPrefill(Known):
    """Prefill of other head dims than 128 takes a path without the cap."""

    capabilities = wide("decode", "extend", options={"logit_cap": True})

    def cap(self, scores, layer):
        return scores if self.extends() and layer.head_dim != 128 else super().cap(scores, layer)


@bug(
    "tokenspeed #759",
    "decode-gqa2x2-d128-bf16-p1-k1500.70-contiguous-gauss-kvfp8e4m3-b3prod",
)
class ScalesNotApplied(Known):
    """The FA4 path gets no scales."""

    capabilities = wide("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, k_scale=1.0, v_scale=1.0)))


@bug("vllm #31380", "decode-gqa4x2-d128-bf16-p64-k7x2-shared-gauss-usualscale-b2prod")
class ScaleFromHeads(Known):
    """Sm_scale = query.shape[1] ** -0.5."""

    capabilities = wide("decode", "extend", options={"any_scaling": False})

    def scores(self, q, k, layer):
        return super().scores(q, k, replace(layer, scaling=q.shape[1] ** -0.5))


@bug("vllm #47079", "decode-gqa2x32-d64-bf16-p16-k130.5.40-shared-gauss-lsepages2-b4prod", "log-sum-exp")
class Log2LseInDcp(WithKVSplits):
    """The decode kernel's LSE is log2, and passes for natural."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16}}, lse=LogSumExp(base="e", pages={"decode"}))

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        return out, lse / math.log(2)


@bug("NATTEN #202", "extend-gqa2x2-d64-bf16-p16-k300.7-n2a2.1-reversed-negative-lseprefixmerged-b3prod", "log-sum-exp")
class MergeByPlainExp(WithKVSplits):
    """The merge exponentiates LSEs as they are."""

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        a, b = torch.exp(lse_a), torch.exp(lse_b)
        total = a + b
        safe = total.clamp(min=1e-38)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / safe[..., None]
        return out.to(out_a.dtype), torch.where(total > 0, safe.log(), -torch.inf)


@bug("Wan2GP #1628", "decode-gqa2x2-d128-bf16-p16-k32.128.64.16.63-reversed-mean-b8prod", "reads-own-kv")
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


@bug("mlc-llm #3426", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class ScaleOneForEncoders(WithoutCausalMask):
    """The fallback attention of encoders is called with scale 1."""

    capabilities = wide("extend", options={"non_causal": {"extend"}})

    def scores(self, q, k, layer):
        return super().scores(q, k, layer if layer.causal else replace(layer, scaling=1.0))


@bug("vllm #47188", "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-shifted-w46-b6small")
class EmptyWindowSplits(Workspace):
    """Splits that the window leaves empty are not written, and are merged."""

    def written(self, parts, rows):
        start = self.window_start(rows)[:, None, None]
        end = (torch.arange(parts.peak.shape[-1], device=start.device) + 1) * self.TILE
        return (end > start).expand_as(parts.peak)
