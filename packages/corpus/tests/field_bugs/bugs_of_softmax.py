"""Weights and sums: soft cap, sinks, partial results and how they are merged, formats of few bits."""

from __future__ import annotations

import torch
from plain_backends import SMALLEST, Parts, Tiled, TwoParts, WithLse, declared

from attn_testkit_corpus.faults.catalogue import bug

EXTEND = "extend-gqa2x2-d64-bf16-p16-k7x2-n9a16.1-reversed-gauss-b2prod"
NEGATIVE = "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b6small"


@bug("llama.cpp #29034", "decode-gqa2x2-d64-bf16-p1-k0.1.8-contiguous-mean-cap1.5-b6stale")
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


@bug("tpu-inference #1954", "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-shifted-w46-b6small", execution="graph")
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


@bug("cutlass #2274, sglang #6101", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b4nan", "finite")
class SplitsCombinedWithoutMaximum(Tiled):
    """Splits are combined by exp(lse), the maximum not taken off: right for small logits alone."""

    def merge(self, parts, rows):
        total = parts.weight.clamp(min=SMALLEST)
        lse = parts.peak + total.log()
        share = torch.exp(lse)
        out = torch.einsum("thn,thnd->thd", share, parts.acc / total[..., None])
        return out / share.sum(-1)[..., None], lse.logsumexp(-1)


@bug("mlc-llm #1995", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
class MergedWithCountOfKVHeads(Tiled):
    """The merge kernel is given the number of KV heads: further query heads keep what the first split says."""

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        merged = rows.layer.tp_k_head_num
        first = parts.acc[:, :, 0] / parts.weight[:, :, 0].clamp(min=SMALLEST)[..., None]
        return torch.cat([out[:, :merged], first[:, merged:]], 1), lse


@bug("rocm-libraries #12227", "decode-gqa2x2-d64-bf16-p16-k1500.70-shuffled-gauss-w700-sink-b3prod")
class SinkTwiceBehindAnEmptySplit(Tiled):
    """An empty first split publishes the sink, and the first one with work begins with it again."""

    capabilities = declared("decode", "extend", options={"sinks": True}, windows={"decode", "extend"})

    def merge(self, parts, rows):
        if rows.layer.sinks is None:
            return super().merge(parts, rows)
        empty = torch.isinf(parts.peak[..., 0])
        peak = torch.where(empty, self.sink_of(rows), -torch.inf)
        return super().merge(parts.and_also(peak[..., None], empty[..., None].float()), rows)


@bug("executorch #22133", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b4nan", "finite")
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


@bug("modular #6591", "extend-gqa2x2-d64-bf16-p16-k1500.70-n13a13.1-reversed-gauss-sink-b3prod")
class SinkByRowModuloHeads(Tiled):
    """The sink of (head, row) is that of its flat index modulo heads: right for one row."""

    capabilities = declared("decode", "extend", options={"sinks": True})

    def sink_of(self, rows):
        heads = rows.layer.tp_q_head_num
        flat = rows.request[:, None] * heads + torch.arange(heads, device=rows.request.device)
        return rows.layer.sinks.float()[(flat * rows.plan.max_q_len + rows.place[:, None]) % heads]


@bug("TensorRT-LLM #15739", "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-chain7-contiguous-one_hot-sink-b6prod")
class SinkForTheFirstRowAlone(Tiled):
    """Rows are flattened as (token, head) and sinks reach the first group: later rows of a verify have none."""

    capabilities = declared("decode", "target-verify", options={"sinks": True})

    def sink_of(self, rows):
        return super().sink_of(rows).masked_fill(rows.place[:, None] > 0, -torch.inf)


@bug("tt-metal #38004", "decode-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-shared-gauss-b7prod")
class PagesPaddedToTiles(Tiled):
    """Pages of fewer than 32 slots are padded with keys of zeros, and each weighs exp(0)."""

    capabilities = declared("decode", "extend", kv_pool={"page_sizes": {16, 32}})

    def merge(self, parts, rows):
        size = rows.plan.page_size
        padded = (rows.kv_lens + size - 1) // size * max(0, 32 - size)
        shape = (*parts.peak.shape[:2], 1)
        peak = torch.where(padded > 0, 0.0, -torch.inf)[:, None, None].expand(shape)
        return super().merge(parts.and_also(peak, padded.float()[:, None, None].expand(shape)), rows)


@bug(
    "lmdeploy #4920",
    "decode-gqa2x2-d64-bf16-p16-k20400-shuffled-gauss-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p1-k66000-n2a2-interleaved-one_hot-b1prod",
)
class ReductionOfAllSplits(Tiled):
    """The reduction is wrong when it has as many splits as there may be, 128: contexts of more than 20,000 tokens."""

    def finish(self, out, rows):
        splits = ((rows.kv_lens + 159) // 160).clamp(max=128)
        return torch.where((splits == 128)[:, None, None], out.roll(1, 1), out)


@bug("llama.cpp #17746", "decode-gqa2x2-d64-fp16-p1-k70.20-reversed-fp16_overflow-b2prod", "finite")
class SumOfValuesInFp16(Tiled):
    """Weighted values are summed in fp16, which large values overflow."""

    capabilities = declared("decode", "extend", precision={"dtypes": {"bf16", "fp16"}})

    def weigh(self, p, v):
        return super().weigh(p, v).half().float()


@bug("vLLM #22003", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class LseViewReadAsContiguous(TwoParts):
    """The merge reads a transposed view of the log-sum-exp as if it were contiguous."""

    def log_sum_exp(self, peak, total, plan):
        right = super().log_sum_exp(peak, total, plan)
        return right.t().contiguous().view(right.shape)


@bug(
    "local-inference vllm #17",
    "extend-gqa2x2-d64-bf16-p1-k70-n2a2-contiguous-gauss-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p1-k32.128.64.16.63-n3a1x4.11-reversed-shifted-b6stale",
)
class NewRowsReadByStrideOfThePrefix(TwoParts):
    """The merge reads both parts by the stride of the prefix's, another one once there are two chunks of it."""

    capabilities = declared("extend", graph=())

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.chunks = -(-sum(batch.extend_prefix_lens_cpu) // 64) if batch.batch_size else 0

    def merge_two(self, old, new):
        if self.chunks < 2:
            return super().merge_two(old, new)
        t, h, d = new[0].shape
        wide = torch.zeros(t, h, d * 3 // 2, device=new[0].device)
        wide[..., :d] = new[0]
        return super().merge_two(old, (wide.flatten()[: t * h * d].view(t, h, d), new[1]))


@bug("TensorRT-LLM #19112", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod")
class MaximumOfTheDefaultScale(TwoParts):
    """The maximum for the merge is that of logits scaled by 1 / sqrt(d), and the softmax has the layer's scale, so
    parts are merged wrongly.
    """

    capabilities = declared("extend")

    def log_sum_exp(self, peak, total, plan):
        return super().log_sum_exp(peak / plan.layer.scaling * plan.layer.head_dim**-0.5, total, plan)


@bug(
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


@bug("mlc-llm #1870", "decode-gqa2x2-d64-fp16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
class LogitsInFp16(Tiled):
    """Products of queries and keys are summed in fp16, which they overflow."""

    capabilities = declared("decode", "extend", precision={"dtypes": {"fp16"}})

    def scores(self, q, k, layer):
        return torch.einsum("thd,tshd->ths", q.float(), k.float()).half().float() * layer.scaling


@bug("aiter #3606", "decode-gqa2x2-d64-bf16-p1-k1500.70-shared-gauss-lsewhole-b3prod", "log-sum-exp", execution="graph")
class LseOfOneSplitNotWritten(WithLse):
    """The reduction alone writes the log-sum-exp: a request of one split keeps what the buffer held."""

    def given_lse(self, lse, parts):
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(self.context.max_num_tokens, lse.shape[1], device=lse.device)
        splits = (~torch.isinf(parts.peak)).sum(-1)
        return torch.where(splits > 1, lse, self.buffer[: len(lse)])


@bug("none: made after the set", "decode-gqa2x2-d64-bf16-p16-k70.20-shared-beyond_fp16-b2prod", "finite")
class Bf16RowsMadeFp16(Tiled):
    """Rows of bf16 are made fp16 for the kernel, which does not hold large ones."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16}})

    def query(self, q, plan):
        return q.half()

    def keys(self, kv, slots, plan):
        return tuple(side.half() for side in super().keys(kv, slots, plan))
