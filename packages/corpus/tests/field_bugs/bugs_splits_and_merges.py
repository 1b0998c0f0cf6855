"""KV splits, log-sum-exps, and merges of partial results."""

from __future__ import annotations

import math

import torch
from parents_formats import PackedKV
from parents_latent import Latent, mla_capabilities
from parents_split_kv import SplitKV
from parents_work_list import LOG2E, WorkList
from plain_backends import FP8, LOWEST, SMALLEST, Parts, Tiled, TwoParts, WithLse, declared, wide_capabilities
from plain_splits import InChunks, WithKVSplits

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import ForwardMode, LogSumExp
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.orders import in_other_order
from attn_testkit_corpus.faults.parent import PlannedBackend


class Workspace(Tiled):
    """Partial results lie in memory that is kept and shared by layers; empty tiles are written as empty."""

    capabilities = declared("decode", "extend", windows={"decode", "extend"})

    def __init__(self, context):
        super().__init__(context)
        self.most = max(context.max_bs, context.max_num_tokens)
        heads = max(layer.tp_q_head_num for layer in context.layers)
        dim = max(layer.v_head_dim for layer in context.layers)
        width = -(-context.max_context_len // context.page_size) * context.page_size
        tiles = -(-width // self.TILE)
        few = {"device": context.device}
        self.peak = torch.full((self.most, heads, tiles), -torch.inf, **few)
        self.weight = torch.zeros((self.most, heads, tiles), **few)
        self.acc = torch.zeros((self.most, heads, tiles, dim), **few)

    def written(self, parts, rows):
        return torch.ones_like(parts.peak, dtype=torch.bool)

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        t, h, n = parts.peak.shape
        if t > self.most:
            return parts
        done = self.written(parts, rows)
        d = parts.acc.shape[-1]
        peak, weight, acc = self.peak[:t, :h, :n], self.weight[:t, :h, :n], self.acc[:t, :h, :n, :d]
        peak.copy_(torch.where(done, parts.peak, peak))
        weight.copy_(torch.where(done, parts.weight, weight))
        acc.copy_(torch.where(done[..., None], parts.acc, acc))
        return Parts(peak.clone(), weight.clone(), acc.clone())


@bug(1, "cutlass #2274, sglang #6101", "decode-gqa2x2-d64-bf16-p16-k15.16.17-shared-negative-b4nan", "finite")
class SplitsCombinedWithoutMaximum(Tiled):
    """Splits are combined by exp(lse), the maximum not taken off: right for small logits alone."""

    def merge(self, parts, rows):
        total = parts.weight.clamp(min=SMALLEST)
        lse = parts.peak + total.log()
        share = torch.exp(lse)
        out = torch.einsum("thn,thnd->thd", share, parts.acc / total[..., None])
        return out / share.sum(-1)[..., None], lse.logsumexp(-1)


@bug(
    1,
    "lmdeploy #4920",
    "decode-gqa2x2-d64-bf16-p16-k20400-shuffled-gauss-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p1-k66000-n2a2-interleaved-one_hot-b1prod",
)
class ReductionOfAllSplits(Tiled):
    """The reduction is wrong when it has as many splits as there may be, 128: contexts of more than 20,000 tokens."""

    def finish(self, out, rows):
        splits = ((rows.kv_lens + 159) // 160).clamp(max=128)
        return torch.where((splits == 128)[:, None, None], out.roll(1, 1), out)


@bug(
    1, "TensorRT-LLM #19112", "extend-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-n2a2x13-shuffled-gauss-b24prod"
)
class MaximumOfTheDefaultScale(TwoParts):
    """The maximum for the merge is that of logits scaled by 1 / sqrt(d), and the softmax has the layer's scale, so
    parts are merged wrongly.
    """

    capabilities = declared("extend")

    def log_sum_exp(self, peak, total, plan):
        return super().log_sum_exp(peak / plan.layer.scaling * plan.layer.head_dim**-0.5, total, plan)


@bug(
    1,
    "aiter #3606",
    "decode-gqa2x2-d64-bf16-p1-k1500.70-shared-gauss-lsewhole-b3prod",
    "log-sum-exp",
    execution="graph",
)
class LseOfOneSplitNotWritten(WithLse):
    """The reduction alone writes the log-sum-exp: a request of one split keeps what the buffer held."""

    def given_lse(self, lse, parts):
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(self.context.max_num_tokens, lse.shape[1], device=lse.device)
        splits = (~torch.isinf(parts.peak)).sum(-1)
        return torch.where(splits > 1, lse, self.buffer[: len(lse)])


@bug(2, "llama.cpp #13852", "decode-gqa2x2-d64-bf16-p16-k4096-shuffled-one_hot-b1prod")
class MoreSplitsThanLanes(Tiled):
    """The combine reads statistics of as many splits as the head dim has lanes; those of further ones are nothing."""

    capabilities = declared("decode")

    def merge(self, parts, rows):
        lanes = parts.acc.shape[-1]
        late = torch.arange(parts.peak.shape[-1], device=parts.peak.device) >= lanes
        return super().merge(parts._replace(peak=parts.peak.masked_fill(late, -torch.inf)), rows)


@bug(
    2,
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


@bug(
    3,
    "xserv 5b350ee",
    "decode-gqa4x2-d128-bf16-p16-k600.513-shuffled-gauss-layers1from0-b2prod",
    "repeatable",
    of_a_tier="decode-gqa4x8-d128-bf16-p16-k600.513.700.431.600.513.700.431.600.513.700.431-shuffled-gauss-layers1from0"
    "-b12prod",
)
class MergedByAtomics(Tiled):
    """Partial results are added in the order in which they arrive, though determinism is declared.

    The bits of every other call are other ones on each processor: ``in_other_order``.
    """

    capabilities = wide_capabilities("decode", "extend", promises={"deterministic": True})

    def __init__(self, context):
        super().__init__(context)
        self.count = torch.zeros(1, dtype=torch.int64, device=context.device)

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1:
            return out
        self.count += rows.layer.layer_id == self.context.layers[0].layer_id
        return in_other_order(out, self.count % 2 == 0)


@bug(3, "lmdeploy #4696", "decode-mha2-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "finite")
class EmptySplitsRead(Tiled):
    """Splits without keys are read as they lie in scratch, with a weight of 0."""

    capabilities = wide_capabilities("decode", "extend")

    def parts(self, scores, seen, v, rows):
        parts = super().parts(scores, seen, v, rows)
        if rows.plan.max_q_len > 1:
            return parts
        scratch = torch.empty_like(parts.acc)
        return parts._replace(acc=torch.where(torch.isinf(parts.peak)[..., None], scratch, parts.acc))


@bug(3, "TensorRT-LLM #18754", "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-shifted-w46-b6small")
class StalePartials(Workspace):
    """Chunks outside the window are not written in a workspace that is kept, and are merged nevertheless."""

    def written(self, parts, rows):
        n = parts.peak.shape[-1]
        end = (torch.arange(n, device=parts.peak.device) + 1) * self.TILE
        return (end > self.window_start(rows)[:, None])[:, None].expand_as(parts.peak)


@bug(4, "aiter #4420", "decode-mla16-d512r64-bf16-p64-k300.70-interleaved-rising_logits-b2nan", "finite")
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


@bug(4, "vllm #47079", "decode-gqa2x32-d64-bf16-p16-k130.5.40-shared-gauss-lsepages2-b4prod", "log-sum-exp")
class Log2LseInDcp(WithKVSplits):
    """The decode kernel's LSE is log2, and passes for natural."""

    capabilities = declared("decode", kv_pool={"page_sizes": {16}}, lse=LogSumExp(base="e", pages={"decode"}))

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        return out, lse / math.log(2)


@bug(
    4, "NATTEN #202", "extend-gqa2x2-d64-bf16-p16-k300.7-n2a2.1-reversed-negative-lseprefixmerged-b3prod", "log-sum-exp"
)
class MergeByPlainExp(WithKVSplits):
    """The merge exponentiates LSEs as they are."""

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        a, b = torch.exp(lse_a), torch.exp(lse_b)
        total = a + b
        safe = total.clamp(min=1e-38)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / safe[..., None]
        return out.to(out_a.dtype), torch.where(total > 0, safe.log(), -torch.inf)


@bug(4, "vllm #47188", "decode-gqa2x2-d64-bf16-p16-k600.70.12-interleaved-shifted-w46-b6small")
class EmptyWindowSplits(Workspace):
    """Splits that the window leaves empty are not written, and are merged."""

    def written(self, parts, rows):
        start = self.window_start(rows)[:, None, None]
        end = (torch.arange(parts.peak.shape[-1], device=start.device) + 1) * self.TILE
        return (end > start).expand_as(parts.peak)


@bug(5, "vllm #39148", "decode-gqa2x2-d64-bf16-p16-k35.0.16.1.70-shared-gauss-lsepages3merged-b6prod", "log-sum-exp")
class BothEmpty(WithKVSplits):
    """Two parts without keys are merged to NaN."""

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        top = torch.maximum(lse_a, lse_b)
        a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / (a + b)[..., None]
        return out.to(out_a.dtype), top + (a + b).log()


@bug(5, "vllm #15492", "decode-gqa2x2-d64-bf16-p16-k300.7-shared-negative-lsepages2merged-b3prod", "log-sum-exp")
class EmptyIsPlusInf(WithKVSplits):
    """The log-sum-exp of a part without keys is +inf."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        return out, lse.masked_fill(lse == -torch.inf, torch.inf)


@bug(5, "vllm #49294", "decode-gqa2x2-d64-bf16-p16-k300.7-shared-negative-lsepages2merged-b3prod", "log-sum-exp")
class EmptyFinite(WithKVSplits):
    """The log-sum-exp of a part without keys is 0."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)


@bug(5, "tilelang #328", "decode-gqa2x2-d64-fp16-p64-k3.133.33.17-interleaved-peaked-w46-b4prod", "finite")
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


@bug(5, "hip-attention #22", "decode-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1.33-shuffled-gauss-b8prod")
class EmptyUnwritten(SplitKV):
    """A split without keys writes nothing, and what its memory held is merged."""

    def store(self, outs, lses, out, lse, has_keys):
        outs.copy_(torch.where(has_keys[:, None, None], out, outs))
        lses.copy_(torch.where(has_keys[:, None], lse, lses))


@bug(6, "tilelang #575", "decode-mqa4-d64-bf16-p1-k9.70.1.33.9.70.1.33-shuffled-gauss-b8prod")
class BlockOverSplit(SplitKV):
    """Splits have their share of the keys, and read whole tiles of 32: the first keys of the next split count twice."""

    def length(self, rows):
        return ((rows.kv_lens + self.SPLITS - 1) // self.SPLITS).clamp(min=1)

    def is_of(self, number, index, rows):
        length = self.length(rows)[:, None]
        tiles = (length + self.TILE - 1) // self.TILE
        return (index >= number * length) & (index < number * length + tiles * self.TILE)


@bug(6, "mlx #4022", "decode-gqa2x2-d64-bf16-p16-k1025.33-shuffled-gauss-layers1from0-b2prod")
class TwoPassBlocks(Tiled):
    """From 1,024 keys on they are dealt to 128 blocks by turns, and with groups the second pass folds 32 of those."""

    capabilities = declared(
        "decode", heads={"gqa_ratios": {2, 4}, "families": {"mha", "gqa"}}, bounds={"max_context_len": 4096}
    )

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.layer.q_per_kv == 1:
            return seen
        return seen & ((rows.kv_lens < 1024)[:, None] | (index % 128 < 32))


@bug(6, "vllm #27491", "decode-mqa5-d64-bf16-p1-k5.0.1x2.70-contiguous-gauss-lsepages3merged-b6prod", "log-sum-exp")
class MergeTwoEmpty(WorkList):
    """The merge of two parts without keys takes -inf from -inf: NaN."""

    def merge_state(self, out_a, lse_a, out_b, lse_b):
        top = torch.maximum(lse_a, lse_b)
        a, b = torch.exp2(lse_a - top), torch.exp2(lse_b - top)
        out = (out_a.float() * a[..., None] + out_b.float() * b[..., None]) / (a + b)[..., None]
        return out.to(out_a.dtype), top + torch.log2(a + b)


@bug(6, "sglang #33926", "decode-mqa5-d64-bf16-p16-k35.0.16.1.70-contiguous-gauss-lsewhole-b6prod", "log-sum-exp")
class LseRebasedTwice(WorkList):
    """A log-sum-exp that has base 2 already is multiplied by log2(e) once more."""

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        out, lse = super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)
        return out, lse * LOG2E


class PartsOf1024(SplitKV):
    """Healthy: a part for each 1,024 keys."""

    CHUNK = 1024
    capabilities = declared("decode")

    def reserve(self):
        self.SPLITS = -(-self.context.max_context_len // self.CHUNK)
        super().reserve()

    def length(self, rows):
        return torch.full_like(rows.kv_lens, self.CHUNK)


@bug(9, "FastDeploy #5541", "decode-gqa2x2-d64-bf16-p1-k16384-shuffled-large_and_small_values-b1prod")
class MergeInModelType(PartsOf1024):
    """Chunks are merged in the dtype of the model: its running sum is rounded with each of them."""

    def merge(self, parts, rows):
        kind = self.context.dtype
        top = parts.peak[..., 0]
        out, total = parts.acc[:, :, 0].to(kind), torch.exp(top - top.clamp(min=LOWEST))
        for number in range(1, parts.peak.shape[-1]):
            peak = parts.peak[..., number]
            new = torch.maximum(top, peak).clamp(min=LOWEST)
            old, add = torch.exp(top - new), torch.exp(peak - new)
            out = out * old.to(kind)[..., None] + parts.acc[:, :, number].to(kind) * add.to(kind)[..., None]
            top, total = new, total * old + add
        return out.float() / total.clamp(min=SMALLEST)[..., None], top + total.log()


@bug(15, "flashinfer #3838", "extend-gqa4x2-d128-bf16-p64-k0x3-n2a2.3.1-chunks3-reversed-one_hot-kvnvfp4-b6stale")
class SumsOfTwoRows(PackedKV):
    """The sum of a row includes that of its neighbor, relative to their own maxima."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4"}, "kv_layouts": {"nhd"}})

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        top = parts.peak.amax(-1).clamp(min=-1e30)
        total = (torch.exp(parts.peak - top[..., None]) * parts.weight).sum(-1)
        row = torch.arange(len(total), device=total.device) ^ 1
        other = torch.where((row < len(total))[:, None], total[row.clamp(max=len(total) - 1)], 0.0)
        return out * (total / (total + other).clamp(min=1e-38))[..., None], lse


@bug(
    15,
    "aiter #4711",
    "target-verify-gqa2x2-d128-bf16-p1-k7.8.9-chain7-interleaved-rising_logits-b4prod",
    "finite",
    execution="graph",
)
class HiddenSplitIsNaN(PlannedBackend):
    """The partial result of a split whose keys the causal mask hides from a row is 0 / 0."""

    capabilities = PlannedBackend.capabilities.with_changes(
        eager={"decode", "target-verify"},
        graph={"decode", "target-verify"},
        windows=(),
        bounds={"max_topk": 1},
        options={"sinks": False, "logit_cap": False},
        kv_pool={"kv_dtypes": {"same"}},
    )

    def partials(self, logits, seen, values, acc, lse):
        super().partials(logits, seen, values, acc, lse)
        sees = seen.any(-1)
        hidden = ~sees & sees.any(2, keepdim=True)
        acc.masked_fill_(hidden[..., None, None], torch.nan)


@bug(
    15,
    "vllm-xpu-kernels #434",
    "extend-gqa4x2-d192-bf16-p16-k0.1.16-n11a15.16.2-chunks3-shared-mean-lsewhole-b4small",
    "log-sum-exp",
)
class LanesWithoutRows(WithLse):
    """In heads of 192 lanes without a row write -inf as the log-sum-exp of the first of 8 rows."""

    capabilities = declared(
        "decode",
        "extend",
        heads={"gqa_ratios": {2, 4}, "head_dims": {64, 192}},
        kv_pool={"page_sizes": {16}},
        lse=LogSumExp(base="e", whole={"decode", "extend"}),
    )

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        if self.mode != "extend" or plan.layer.head_dim != 192:
            return out, lse
        first = self.rows_of(q, plan).place % 8 == 0
        return out, lse.masked_fill(first[:, None], -torch.inf)


# 9, tokenspeed #571: the softmax of the prefill runs in base 2, and so does its log-sum-exp.
@bug(
    18,
    "tokenspeed #571",
    "extend-mla2-d512r32-fp32-p16-k15.16.17-n7a1x2.19-chunks3-contiguous-peaked-kvfp8e4m3-kvinblock-w11-cap1.5-sink-lseprefix-b4prod-noncausal-leftofrow",
    "log-sum-exp",
)
class PrefillInBase2(TorchNativeBackend):
    """The log-sum-exp of a prefill is in base 2, and e is declared."""

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        out, lse = super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)
        return out, lse / math.log(2) if batch.forward_mode is ForwardMode.EXTEND else lse
