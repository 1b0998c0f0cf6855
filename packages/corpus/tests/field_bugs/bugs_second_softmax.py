"""Weights, scales, sinks, partial results; bugs of the second set."""

from __future__ import annotations

from dataclasses import replace

import torch
from plain_backends import LOWEST, SMALLEST, Tiled, declared
from plain_splits import InChunks, RowsAsGiven

from attn_testkit_corpus.faults.catalogue import bug

FP8 = {"fp8_e4m3"}


@bug("aprender #2753", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
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


@bug("llama.cpp #13852", "decode-gqa2x2-d64-bf16-p16-k4096-shuffled-one_hot-b1prod")
class MoreSplitsThanLanes(Tiled):
    """The combine reads statistics of as many splits as the head dim has lanes; those of further ones are nothing."""

    capabilities = declared("decode")

    def merge(self, parts, rows):
        lanes = parts.acc.shape[-1]
        late = torch.arange(parts.peak.shape[-1], device=parts.peak.device) >= lanes
        return super().merge(parts._replace(peak=parts.peak.masked_fill(late, -torch.inf)), rows)


@bug("rocm-libraries #11189", "decode-gqa2x2-d64-bf16-p16-k7x2-contiguous-shifted-kvfp8e4m3-sink-b2prod")
class SinkNotShifted(Tiled):
    """Probabilities of FP8 are 2^8 times as large in the sum, and the sink is not."""

    capabilities = declared(
        "decode", "extend", kv_pool={"kv_dtypes": FP8}, precision={"matmul_dtype": "fp8_e4m3"}, options={"sinks": True}
    )

    def sink_of(self, rows):
        return super().sink_of(rows) - 8 * 0.6931471805599453


@bug("atlas #341", "decode-gqa2x2-d64-bf16-p16-k7x2-contiguous-shifted-sink-b2prod")
class SinksReadAsBf16(Tiled):
    """The sinks of float32 are read as if they were bfloat16."""

    capabilities = declared("decode", "extend", options={"sinks": True})

    def sink_of(self, rows):
        sinks = rows.layer.sinks
        return sinks.view(torch.bfloat16)[: len(sinks)].float()[None].expand(len(rows.request), -1)


@bug(
    "openvino #37377",
    "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-kvfp8e4m3-b24prod",
)
class BoundaryTileFromTheCache(RowsAsGiven):
    """The tile of 16 keys in which the prefix ends is read from the pool as a whole."""

    def is_given(self, index, rows):
        return index // 16 * 16 >= rows.prefix[:, None]


@bug("FreeToken #103", "decode-gqa2x2-d64-fp32-p1-k3x45.1x43.9x44-reversed-gauss-kvfp8e4m3-b132prod", "writes-own-kv")
class Fp8RoundedTwice(Tiled):
    """Rows are cut off to fp16 before they are rounded to FP8: quotients of bf16 rows never show it."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8}, precision={"dtypes": {"fp16", "fp32"}})

    def write_kv(self, k, v, plan):
        layer = plan.layer

        def rounded(rows, scale):
            x = (rows.float() / scale).clamp(-448, 448)
            cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
            return cut.to(torch.float8_e4m3fn).float()

        pool = self.context.group_of(layer).kv_pool
        once = replace(layer, k_scale=1.0, v_scale=1.0)
        pool.set_kv_buffer(once, plan.out_cache_loc, rounded(k, layer.k_scale), rounded(v, layer.v_scale))


@bug("vLLM #45720", "decode-gqa2x2-d64-bf16-p1-k7.8.9-reversed-gauss-kvfp8e4m3-b3prod", "finite")
class FnuzBytes(Tiled):
    """The pool's bytes are read as another FP8 format, in which they are half as much."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        found = super().keys(tuple(side.view(torch.uint8) for side in kv), slots, plan)
        return tuple(side.view(torch.float8_e4m3fnuz).float() for side in found)


@bug("vLLM #42580", "decode-gqa2x2-d64-bf16-p1-k7.8.9-reversed-gauss-kvfp8e4m3-b3prod")
class DescaleDroppedForFp8Queries(Tiled):
    """With queries of FP8 the scales of K and V are not applied."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8}, precision={"matmul_dtype": "fp8_e4m3"})

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, k_scale=1.0, v_scale=1.0)))


@bug("vllm-plugin-FL #400", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n1a1x3-shared-negative-b3prod")
class DecodeScaledLikePrefill(Tiled):
    """Decode gives its scale to a kernel that divides by sqrt(head_dim) itself."""

    capabilities = declared("decode", "extend")

    def run(self, q, kv, plan):
        layer = plan.layer
        if plan.max_q_len == 1:
            layer = replace(layer, scaling=layer.scaling * layer.head_dim**-0.5)
        return super().run(q, kv, replace(plan, layer=layer))


@bug("hpc-ops #6", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
class LseOfTheFirstKVHead(Tiled):
    """Splits are combined by the log-sum-exp of the first KV head's group."""

    capabilities = declared("decode")

    def merge(self, parts, rows):
        group = rows.layer.q_per_kv
        first = torch.arange(parts.peak.shape[1], device=parts.peak.device) % group
        out = parts.acc / parts.weight.clamp(min=SMALLEST)[..., None]
        lse = (parts.peak + parts.weight.clamp(min=SMALLEST).log())[:, first]
        lse = lse.masked_fill(torch.isinf(parts.peak), -torch.inf)
        top = lse.amax(-1).clamp(min=LOWEST)
        share = torch.exp(lse - top[..., None])
        total = share.sum(-1).clamp(min=SMALLEST)
        return torch.einsum("thn,thnd->thd", share, out) / total[..., None], top + total.log()


@bug(
    "local-inference vllm #468",
    "extend-gqa2x2-d192-bf16-p1-k130-n3a3-contiguous-mean-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d192-bf16-p1-k600.70.12-n8a19.1.2-shared-peaked-b6nan",
)
class AliasedLse(InChunks):
    """The merged log-sum-exp is stored over the running one, which a head's lanes in the next block still read."""

    def fold(self, running, chunk):
        out, lse = self.join(running, chunk)
        dim = out.shape[-1]
        lanes = dim // 8
        first = (torch.arange(lse.numel(), device=lse.device) * lanes).view(lse.shape)
        lane = first[..., None] + torch.arange(dim, device=lse.device) // 8
        late, _ = self.join((running[0], lse), chunk)
        return torch.where(lane // 128 > (first // 128)[..., None], late, out), lse
