"""Weights, sinks, scales, partial results; bugs of the fifth set."""

from __future__ import annotations

import math

import torch
from fifth_parents_split import SplitKV
from fifth_parents_work import WorkList
from plain_backends import LOWEST, Tiled, declared
from plain_splits import WithKVSplits
from third_parents import FP8, SPEC, Latent, mla_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "FlashMLA-ETAP #2", "target-verify-mla16-d512r64-bf16-p16-k31.127.63.15.63-chain2-shuffled-shifted-b5prod", "finite"
)
class LastTileRow(Latent):
    """A row that sees no key of its request's last tile has -inf minus -inf."""

    capabilities = mla_capabilities(*SPEC)

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        first = torch.arange(parts.peak.shape[-1], device=scores.device) * self.TILE
        lost = (first > rows.position[:, None]) & (first < rows.kv_lens[:, None])
        return parts._replace(weight=parts.weight.masked_fill(lost[:, None], math.nan))


@bug("sglang-jax #905", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shuffled-one_hot-sink-b6small")
class SinkDropped(Tiled):
    """The fused path, here of a prompt without prefix, has no sink."""

    capabilities = declared("decode", "extend", options={"sinks": True})

    def sink_of(self, rows):
        return super().sink_of(rows).masked_fill((rows.prefix == 0)[:, None], LOWEST)


@bug("vllm #15492", "decode-gqa2x2-d64-bf16-p16-k300.7-shared-negative-lsepages2merged-b3prod", "log-sum-exp")
class EmptyIsPlusInf(WithKVSplits):
    """The log-sum-exp of a part without keys is +inf."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        return out, lse.masked_fill(lse == -torch.inf, torch.inf)


@bug("vllm #49294", "decode-gqa2x2-d64-bf16-p16-k300.7-shared-negative-lsepages2merged-b3prod", "log-sum-exp")
class EmptyFinite(WithKVSplits):
    """The log-sum-exp of a part without keys is 0."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)


@bug("vllm #55670", "extend-gqa2x2-d64-bf16-p1-k600.70.12-n5a11.1x2-chunks3-shuffled-peaked-kvfp8e4m3-b3prod")
class Fp8Scratch(Tiled):
    """With an FP8 pool outputs go through FP8 memory, without its scale."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def finish(self, out, rows):
        if self.context.kv_pool.dtype.itemsize != 1:
            return out
        return out.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(out.dtype)


@bug("tilelang #328", "decode-gqa2x2-d64-fp16-p64-k3.133.33.17-interleaved-peaked-w46-b4prod", "finite")
class EmptyFirstSplit(SplitKV):
    """The running maximum begins at -inf, and the first split may have no key."""

    def merge(self, parts, rows):
        top = torch.full_like(parts.peak[..., 0], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(parts.acc[:, :, 0])
        if rows.layer.sinks is not None:
            top, total = self.sink_of(rows), total + 1
        for peak, acc in zip(parts.peak.unbind(-1), parts.acc.unbind(2), strict=True):
            higher = torch.maximum(top, peak)
            a, b = torch.exp(top - higher), torch.exp(peak - higher)
            total, out, top = total * a + b, out * a[..., None] + acc * b[..., None], higher
        return out / total[..., None], top + total.log()


@bug(
    "ATOM #2057",
    "decode-mqa5-d64-bf16-p16-k35.0.16.1.70-contiguous-gauss-lsepages2-b6prod",
    "log-sum-exp",
    execution="graph",
)
class ZeroRowsShift(WorkList):
    """A request without keys in a part spoils the work items of later short ones."""

    def items(self, lens):
        found, shifted = [], False
        for request, count in enumerate(lens):
            shifted = shifted or count == 0
            if shifted and count <= self.CHUNK:
                found.append((request - (count > 0), 0, count))
            else:
                found += [(request, a, min(a + self.CHUNK, count)) for a in range(0, count, self.CHUNK)]
        return found
