"""Sinks, soft caps, and the scale of the logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_launchers import Known, wide, windowed
from parents_native import Native
from parents_split_kv import SplitKV
from plain_backends import FP8, LOWEST, ONLY_FP8, SMALLEST, Tiled, WithoutCausalMask, declared, wide_capabilities
from plain_splits import WithKVSplits
from torch.nn.functional import pad

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug

INF = float("inf")


@bug(1, "llama.cpp #29034", "decode-gqa2x2-d64-bf16-p1-k0.1.8-contiguous-mean-cap1.5-b6stale")
class SoftCapBehindTheTail(Tiled):
    """The tail of the last tile is minus infinity before the soft cap: each of its keys weighs exp(-cap) in decode."""

    capabilities = declared("decode", "extend", options={"logit_cap": True})

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        cap = rows.layer.logit_cap
        if not cap or rows.plan.max_q_len > 1:
            return parts
        tail = -rows.kv_lens % self.TILE
        extra = (tail[:, None, None] * torch.exp(-cap - parts.peak)).nan_to_num(0, 0, 0)
        last = (rows.kv_lens - 1).clamp(min=0) // self.TILE
        here = torch.arange(parts.peak.shape[-1], device=scores.device) == last[:, None]
        return parts._replace(weight=parts.weight + extra * here[:, None])


@bug(1, "rocm-libraries #12227", "decode-gqa2x2-d64-bf16-p16-k1500.70-shuffled-gauss-w700-sink-b3prod")
class SinkTwiceBehindAnEmptySplit(Tiled):
    """An empty first split publishes the sink, and the first one with work begins with it again."""

    capabilities = declared("decode", "extend", options={"sinks": True}, windows={"decode", "extend"})

    def merge(self, parts, rows):
        if rows.layer.sinks is None:
            return super().merge(parts, rows)
        empty = torch.isinf(parts.peak[..., 0])
        peak = torch.where(empty, self.sink_of(rows), -torch.inf)
        return super().merge(parts.and_also(peak[..., None], empty[..., None].float()), rows)


@bug(1, "modular #6591", "extend-gqa2x2-d64-bf16-p16-k1500.70-n13a13.1-reversed-gauss-sink-b3prod")
class SinkByRowModuloHeads(Tiled):
    """The sink of (head, row) is that of its flat index modulo heads: right for one row."""

    capabilities = declared("decode", "extend", options={"sinks": True})

    def sink_of(self, rows):
        heads = rows.layer.tp_q_head_num
        flat = rows.request[:, None] * heads + torch.arange(heads, device=rows.request.device)
        return rows.layer.sinks.float()[(flat * rows.plan.max_q_len + rows.place[:, None]) % heads]


@bug(1, "TensorRT-LLM #15739", "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-chain7-contiguous-one_hot-sink-b6prod")
class SinkForTheFirstRowAlone(Tiled):
    """Rows are flattened as (token, head) and sinks reach the first group: later rows of a verify have none."""

    capabilities = declared("decode", "target-verify", options={"sinks": True})

    def sink_of(self, rows):
        return super().sink_of(rows).masked_fill(rows.place[:, None] > 0, -torch.inf)


@bug(
    1,
    "TensorRT-LLM #19220",
    "target-verify-gqa2x2-d64-bf16-p1-k41.73.137-chain4-shuffled-gauss-w11-sink-b3prod",
    "finite",
)
class SinkInASplitWithoutAKey(Tiled):
    """The split that adds the sink has no key for a row: exp(sink + 1e5) is infinite."""

    capabilities = declared("decode", "target-verify", options={"sinks": True}, windows={"decode", "target-verify"})

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        if rows.layer.sinks is None or rows.layer.sliding_window_size < 0:
            return out, lse
        start = self.window_start(rows)
        without = start.clamp(min=0) // self.TILE > (start - rows.place).clamp(min=0) // self.TILE
        return out.masked_fill(without[:, None, None], torch.nan), lse


@bug(2, "rocm-libraries #11189", "decode-gqa2x2-d64-bf16-p16-k7x2-contiguous-shifted-kvfp8e4m3-sink-b2prod")
class SinkNotShifted(Tiled):
    """Probabilities of FP8 are 2^8 times as large in the sum, and the sink is not."""

    capabilities = declared(
        "decode",
        "extend",
        kv_pool={"kv_dtypes": ONLY_FP8},
        precision={"matmul_dtype": "fp8_e4m3"},
        options={"sinks": True},
    )

    def sink_of(self, rows):
        return super().sink_of(rows) - 8 * 0.6931471805599453


@bug(2, "atlas #341", "decode-gqa2x2-d64-bf16-p16-k7x2-contiguous-shifted-sink-b2prod")
class SinksReadAsBf16(Tiled):
    """The sinks of float32 are read as if they were bfloat16."""

    capabilities = declared("decode", "extend", options={"sinks": True})

    def sink_of(self, rows):
        sinks = rows.layer.sinks
        return sinks.view(torch.bfloat16)[: len(sinks)].float()[None].expand(len(rows.request), -1)


@bug(2, "vllm-plugin-FL #400", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n1a1x3-shared-negative-b3prod")
class DecodeScaledLikePrefill(Tiled):
    """Decode gives its scale to a kernel that divides by sqrt(head_dim) itself."""

    capabilities = declared("decode", "extend")

    def run(self, q, kv, plan):
        layer = plan.layer
        if plan.max_q_len == 1:
            layer = replace(layer, scaling=layer.scaling * layer.head_dim**-0.5)
        return super().run(q, kv, replace(plan, layer=layer))


@bug(3, "llama.cpp #22286", "decode-gqa32x2-d64-bf16-p16-k70.33.1-shuffled-gauss-sink-b3prod")
class SinksOfSixteenHeads(Tiled):
    """Both groups of warps that share 32 heads read the sinks of the first 16."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {4, 32}}, options={"sinks": True})

    def sink_of(self, rows):
        sinks = rows.layer.sinks.float()
        head = torch.arange(len(sinks), device=sinks.device)
        if rows.layer.q_per_kv == 32:
            head = head // 32 * 32 + head % 16
        return sinks[head][None].expand(len(rows.request), -1)


@bug(3, "sgl-kernel-xpu #491", "decode-gqa4x2-d64-bf16-p1-k32.128.64.16.63-interleaved-one_hot-cap1.5-b5prod")
@bug(
    6,
    "vllm-metal #665",
    "decode-gqa2x2-d64-bf16-p1-k0.1.8-contiguous-mean-cap1.5-b6stale",
    of_a_tier="decode-gqa4x2-d64-bf16-p1-k32.128.64.16.63-interleaved-one_hot-cap1.5-b5prod",
)
class SoftCapNotApplied(Tiled):
    """The cap of the logits is taken and never applied."""

    capabilities = wide_capabilities("decode", "extend", options={"logit_cap": True})

    def cap(self, scores, layer):
        return scores


@bug(4, "ipex-llm #12619", "decode-gqa4x2-d80-bf16-p1-k600.70.12-reversed-shifted-usualscale-b3prod")
class PaddedHeadDimScale(Known):
    """The scale of the padded head dim."""

    capabilities = wide("decode", "extend", heads={"head_dims": {80, 96, 128}}, options={"any_scaling": False})

    def scores(self, q, k, layer):
        padded = next(n for n in (64, 128, 256) if n >= layer.head_dim)
        return super().scores(q, k, replace(layer, scaling=padded**-0.5))


@bug(
    4,
    "tpu-inference #3167",
    "extend-gqa3x2-d128-bf16-p64-k3.17-n5a4.5-shuffled-peaked-sink-b2prod",
    of_a_tier="extend-gqa3x2-d128-bf16-p1-k0.1.8-n6a8.1.9-chunks3-shared-one_hot-sink-b3prod",
)
class GroupPaddedSinks(Known):
    """Query heads are packed in groups of a power of two, sinks are not."""

    capabilities = wide("decode", "extend", heads={"gqa_ratios": {3, 4}}, options={"sinks": True})

    def sink_of(self, rows):
        layer = rows.layer
        g = layer.q_per_kv
        padded = 1 << (g - 1).bit_length()
        head = torch.arange(layer.tp_q_head_num, device=rows.request.device)
        at = (head // g * padded + head % g).clamp(max=layer.tp_q_head_num - 1)
        return layer.sinks.float()[at][None].expand(len(rows.request), -1)


@bug(
    4,
    "onnx #7867",
    "extend-gqa2x2-d64-bf16-p16-k3-n4a4-contiguous-gauss-cap1.5-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-contiguous-negative-w4000-cap1.5-b8stale",
)
class SoftcapAfterMask(Known):
    """The soft cap comes after the mask, and masked keys get the logit -cap."""

    capabilities = windowed("decode", "extend", options={"logit_cap": True})

    def parts(self, scores, seen, v, rows):
        cap = rows.layer.logit_cap
        if cap:
            index = torch.arange(seen.shape[1], device=seen.device)
            scores = torch.where(seen[:, None], scores, -cap)
            seen = index < rows.kv_lens[:, None]
        return super().parts(scores, seen, v, rows)


@bug(
    4,
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
    4,
    "imp #688",
    "extend-gqa4x2-d64-bf16-p64-k9-n5a5-interleaved-rising_logits-cap1.5-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k1500.70-n5a5.1-reversed-gauss-cap1.5-b3prod",
)
class CapLostInPrefill(Known):
    """Prefill of other head dims than 128 takes a path without the cap."""

    capabilities = wide("decode", "extend", options={"logit_cap": True})

    def cap(self, scores, layer):
        return scores if self.extends() and layer.head_dim != 128 else super().cap(scores, layer)


@bug(4, "vllm #31380", "decode-gqa4x2-d128-bf16-p64-k7x2-shared-gauss-usualscale-b2prod")
class ScaleFromHeads(Known):
    """Sm_scale = query.shape[1] ** -0.5."""

    capabilities = wide("decode", "extend", options={"any_scaling": False})

    def scores(self, q, k, layer):
        return super().scores(q, k, replace(layer, scaling=q.shape[1] ** -0.5))


@bug(4, "mlc-llm #3426", "extend-gqa2x2-d64-bf16-p16-k9.530.70.0-n8a20.1.3.7-interleaved-gauss-b4prod-noncausal")
class ScaleOneForEncoders(WithoutCausalMask):
    """The fallback attention of encoders is called with scale 1."""

    capabilities = wide("extend", options={"non_causal": {"extend"}})

    def scores(self, q, k, layer):
        return super().scores(q, k, layer if layer.causal else replace(layer, scaling=1.0))


@bug(5, "sglang-jax #905", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shuffled-one_hot-sink-b6small")
class SinkDropped(Tiled):
    """The fused path, here of a prompt without prefix, has no sink."""

    capabilities = declared("decode", "extend", options={"sinks": True})

    def sink_of(self, rows):
        return super().sink_of(rows).masked_fill((rows.prefix == 0)[:, None], LOWEST)


@bug(6, "imp #1303", "draft-extend-mqa4-d128-bf16-p16-k1.2.5.9.14.2.30-n2a1x7-shared-shifted-cap1.5-sink-b8small")
class SinkOnlyInSplit(SplitKV):
    """Rows of 32 keys at most, which are not split, have no sink in their denominator."""

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        if rows.layer.sinks is None:
            return out, lse
        without = replace(rows, plan=replace(rows.plan, layer=replace(rows.layer, sinks=None)))
        single = rows.kv_lens <= self.TILE
        return torch.where(single[:, None, None], super().merge(parts, without)[0], out), lse


@bug(6, "onnx #7865", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n5a1x2.11-chunks3-shared-negative-w4000-cap1.5-b6prod")
class MaskThenCap(Tiled):
    """The soft cap comes after the mask: minus infinity becomes minus the cap, and takes weight."""

    capabilities = declared("decode", "extend", options={"logit_cap": True}, windows={"decode", "extend"})

    def parts(self, scores, seen, v, rows):
        cap = rows.layer.logit_cap
        if not cap:
            return super().parts(scores, seen, v, rows)
        there = torch.arange(seen.shape[1], device=seen.device) < rows.kv_lens[:, None]
        return super().parts(scores.masked_fill(~seen[:, None], -cap), there, v, rows)


@bug(
    10,
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


@bug(12, "vllm #26325", "decode-gqa2x2-d64-bf16-p16-k560.601.577.1040.561.700.563.641.624-shared-gauss-sink-b9prod")
class CascadeWithoutSinks(Known):
    """From eight requests and 256 common keys on, a cascade attends them, which is given no sinks."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16}}, options={"sinks": True})

    def sink_of(self, rows):
        sinks, pages = super().sink_of(rows), rows.plan.page_table
        alike = (pages == pages[:1]).all(0).long().cumprod(0).sum() * rows.plan.page_size
        common = torch.minimum(alike, rows.plan.prefix_lens.min())
        cascades = (common >= 256) & (len(pages) >= 8)
        return torch.where(cascades, -INF, sinks)


@bug(15, "vllm-xpu-kernels #514", "decode-gqa4x2-d128-bf16-p64-k600.70.12-shuffled-gauss-w46-sink-b3prod", "finite")
class SinkOfFirstTile(Known):
    """A decode adds the sink to the sum of the first tile, relative to that tile's maximum."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"}, options={"sinks": True})

    def merge(self, parts, rows):
        sinks = rows.layer.sinks
        if sinks is None or not self.decodes():
            return super().merge(parts, rows)
        weight = parts.weight.clone()
        weight[..., 0] += torch.exp(self.sink_of(rows) - parts.peak[..., 0])
        bare = replace(rows, plan=replace(rows.plan, layer=replace(rows.layer, sinks=None)))
        return super().merge(parts._replace(weight=weight), bare)


# imp #1345: the FP8 decode kernel takes no pointer to sinks.
@bug(
    16,
    "imp #1345",
    "decode-gqa4x2-d128-bf16-p64-k133.3.0.64.9.33.1.17.5-shared-rising_logits-kvfp8e4m3-w4000-sink-b12nan",
)
class NoSinksInFp8(Native):
    """A decode over an FP8 pool leaves the sinks out."""

    capabilities = wide(
        "decode", "extend", kv_pool={"kv_dtypes": FP8}, options={"sinks": True}, windows={"decode", "extend"}
    )

    def _attend(self, q, layer, seen):
        if self.mode.is_decode() and self.is_fp8():
            layer = replace(layer, sinks=None)
        return super()._attend(q, layer, seen)


# tpu-inference #3167: query heads are packed in pairs for each KV head, and sinks are padded as one list.
@bug(16, "tpu-inference #3167", "decode-mha2-d128-bf16-p1-k13-interleaved-gauss-w0-sink-b4prod", execution="graph")
class SinksPaddedAtTheEnd(Native):
    """With an odd number of query heads for a KV head, those of later KV heads have the sinks of others."""

    capabilities = wide(
        "decode",
        "extend",
        heads={"families": {"mha", "gqa"}, "gqa_ratios": {2, 4, 5, 7, 8}},
        options={"sinks": True},
        windows={"decode", "extend"},
    )

    def _masked(self, logits, seen, layer):
        if layer.sinks is not None:
            heads, group = layer.tp_k_head_num, layer.q_per_kv
            packed = group + group % 2
            sinks = pad(layer.sinks, (0, heads * packed - len(layer.sinks))).view(heads, packed)[:, :group]
            layer = replace(layer, sinks=sinks.flatten())
        return super()._masked(logits, seen, layer)
