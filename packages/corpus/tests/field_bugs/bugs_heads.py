"""Heads, groups and head dims: which KV head, how many, and kernels that serve only some."""

from __future__ import annotations

import torch
from parents_latent import Latent, LatentLse, mla_capabilities
from parents_launchers import Known, wide
from parents_native import MLA, Native
from plain_backends import FP8, LOWEST, SMALLEST, SPEC, Tiled, WithLse, declared, wide_capabilities
from plain_splits import WithKVSplits

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug

_SPLIT_FROM = 256
"""Keys of a request beyond which the kernel splits them."""


@bug(1, "vLLM #34570", "decode-gqa2x2-d32-bf16-p1-k7x2-reversed-negative-b2prod", "output-written")
class NoLoopForSmallHeads(Tiled):
    """The loop over values runs head_dim / 16 / 4 times: for head dim 32 not at all."""

    capabilities = declared("decode", "extend", heads={"head_dims": {32, 64, 128}})

    def finish(self, out, rows):
        return out if rows.layer.head_dim // 16 // 4 else torch.empty_like(out)


@bug(1, "TensorRT-LLM #6573", "extend-gqa16x2-d64-bf16-p1-k600.70.12-n6a9.7.1-shared-gauss-b6nan")
class GroupsOfMoreThanEight(Tiled):
    """In groups of more than 8 the heads from the ninth on get results of the first ones."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {4, 8, 16}})

    def finish(self, out, rows):
        group = rows.layer.q_per_kv
        head = torch.arange(rows.layer.tp_q_head_num, device=out.device)
        return out[:, head // group * group + head % group % 8]


@bug(1, "llama.cpp #19115", "decode-gqa3x2-d64-bf16-p1-k0.1.8-shuffled-peaked-b3prod")
class GroupPaddedToPowerOfTwo(Tiled):
    """The group is padded to a power of 2, so groups of 3 and 6 read wrong KV heads."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 3, 4, 6}})

    def kv_head(self, layer, device):
        return torch.arange(layer.tp_q_head_num, device=device) // (1 << (layer.q_per_kv - 1).bit_length())


@bug(1, "mlc-llm #1995", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
class MergedWithCountOfKVHeads(Tiled):
    """The merge kernel is given the number of KV heads: further query heads keep what the first split says."""

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        merged = rows.layer.tp_k_head_num
        first = parts.acc[:, :, 0] / parts.weight[:, :, 0].clamp(min=SMALLEST)[..., None]
        return torch.cat([out[:, :merged], first[:, merged:]], 1), lse


@bug(
    2,
    "TensorRT-LLM #17643",
    "decode-gqa2x2-d64-bf16-p16-k3.37.9.17-contiguous-one_hot-layers2from5-b4prod-empty_batches-overlap_scheduling",
    "completes",
)
class LayerZeroNamesThePool(Tiled):
    """The number of pages is asked of layer 0."""

    capabilities = declared("decode")

    def __init__(self, context):
        super().__init__(context)
        self.pages = len(context.kv_pool.get_layer_buffer(0)[0])


@bug(
    2,
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


@bug(2, "hpc-ops #6", "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale")
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


@bug(2, "vLLM #42956", "decode-mla32-d512r64-bf16-p1-k63.64.65-reversed-gauss-kvfp8e4m3-b4nan", "output-written")
class FoldedHeadsReturnNothing(Tiled):
    """FP8 and 32 heads: the fold to 16 returns an empty output."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {16, 32}, "head_dims": {512}},
        kv_pool={"kv_dtypes": {"fp8_e4m3"}},
    )

    def finish(self, out, rows):
        return torch.empty_like(out) if rows.layer.tp_q_head_num == 32 else out


@bug(3, "llm-scaler #359", "decode-gqa8x2-d128-bf16-p16-k21-reversed-negative-b2prod", "output-written")
class GroupOfFour(Tiled):
    """The decode kernel has 4 query heads for each KV head built in: further ones are not written."""

    capabilities = wide_capabilities("decode", "extend", heads={"families": {"gqa"}, "gqa_ratios": {4, 8}})

    def finish(self, out, rows):
        if rows.plan.max_q_len > 1:
            return out
        head = torch.arange(out.shape[1], device=out.device) % rows.layer.q_per_kv
        return torch.where((head < 4)[None, :, None], out, torch.empty_like(out))


@bug(
    3,
    "mlc-llm #1889",
    "extend-gqa4x2-d80-bf16-p16-k9.37-n3a3x2-shuffled-gauss-layers1from0-b2prod",
    "output-written",
    of_a_tier="extend-gqa4x2-d80-bf16-p16-k1100x2-n96a96x2-shuffled-gauss-layers1from0-b2prod",
)
class PrefillTilesOf32(Tiled):
    """Prefill walks the head dim in whole tiles of 32: of 80, the last 16 are left out."""

    capabilities = wide_capabilities("decode", "extend", heads={"head_dims": {64, 80, 128}})

    def query(self, q, plan):
        if plan.max_q_len == 1:
            return q
        return q * (torch.arange(q.shape[-1], device=q.device) < q.shape[-1] // 32 * 32)

    def finish(self, out, rows):
        if rows.plan.max_q_len == 1:
            return out
        done = torch.arange(out.shape[-1], device=out.device) < out.shape[-1] // 32 * 32
        return torch.where(done, out, torch.empty_like(out))


@bug(
    3,
    "sparkinfer #330, sparkinfer #425",
    "decode-gqa4x2-d256-bf16-p16-k1025.33-shuffled-gauss-kvfp8e4m3-layers1from0-b2prod",
)
class HardCoded128(Tiled):
    """The FP8 decode of long contexts has a head dim of 128 built in: of 256, the second half is not computed."""

    capabilities = wide_capabilities(
        "decode",
        "extend",
        heads={"head_dims": {128, 256}, "gqa_ratios": {4, 8}},
        kv_pool={"page_sizes": {16, 64}, "kv_dtypes": FP8},
    )

    def finish(self, out, rows):
        plan = rows.plan
        if plan.max_q_len > 1 or plan.page_size != 16 or self.context.kv_pool.dtype.itemsize > 1:
            return out
        long = rows.kv_lens >= 16 * 32
        far = torch.arange(out.shape[-1], device=out.device) >= 128
        return out.masked_fill(long[:, None, None] & far, 0.0)


@bug(3, "tokenspeed #212", "decode-mla16-d512r64-bf16-p1-k5.0.1x2.70-shuffled-gauss-lsewhole-b6prod", "log-sum-exp")
class LseTileBeyondHeads(LatentLse):
    """Log-sum-exps are stored for 64 heads a row: with fewer heads, those of the next row are written over."""

    capabilities = mla_capabilities("decode", heads={"gqa_ratios": {16, 64}}, lse=LogSumExp(base="e", whole={"decode"}))

    def given_lse(self, lse, parts):
        t, h = lse.shape
        if h >= 64:
            return lse
        odd = (torch.arange(t, device=lse.device) % 2 == 1)[:, None]
        return lse.masked_fill(odd, 0.0)


@bug(
    3,
    "vLLM #51011",
    "target-verify-mla16-d512r64-bf16-p1-k21.3.0.8.9.33.1.17.5-chain7-contiguous-shifted-kvfp8e4m3-b9prod",
    "completes",
)
class WidthNotInTheTable(Latent):
    """FP8 kernels are looked up by the number of rows: some have none."""

    capabilities = mla_capabilities(*SPEC, kv_pool={"kv_dtypes": FP8})
    WIDTHS = (1, 2, 4)

    def run(self, q, kv, plan):
        if self.context.kv_pool.dtype.itemsize == 1 and plan.max_q_len not in self.WIDTHS:
            raise KeyError(plan.max_q_len)
        return super().run(q, kv, plan)


@bug(4, "LMCache #3092", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "reads-own-kv")
class QueryHeadAsKvHead(Known):
    """The query head indexes K and V."""

    capabilities = wide("decode", "extend")

    def keys(self, kv, slots, plan):
        found = []
        heads = torch.arange(plan.layer.tp_q_head_num, device=slots.device)
        for side in kv:
            flat = side.reshape(-1, side.shape[-1])
            at = slots[:, :, None] * side.shape[2] + heads
            found.append(flat[at.clamp(max=len(flat) - 1)])
        return tuple(found)

    def kv_head(self, layer, device):
        return torch.arange(layer.tp_q_head_num, device=device)


@bug(4, "vllm #51088", "decode-mla12-d512r64-bf16-p1-k21.3-shuffled-gauss-b2prod")
class TwelveHeadsAsSixteen(Latent):
    """16 // 12 = 1 repeat: a kernel of 16 heads runs over rows of 12."""

    capabilities = mla_capabilities("decode", heads={"gqa_ratios": {12, 16}})

    def run(self, q, kv, plan):
        t, h, d = q.shape
        if h % 16 == 0:
            return super().run(q, kv, plan)
        flat = torch.cat([q.reshape(t * h, d), q.new_zeros(t * (16 - h), d)])
        out = super().run(flat.view(t, 16, d), kv, plan)
        return out.flatten(0, 1)[: t * h].view(t, h, -1)


@bug(4, "triton #621", "decode-gqa4x2-d128-bf16-p64-k3.133.33.17-contiguous-shifted-b7small")
class HeadDim64Only(Known):
    """64 is hard-coded."""

    capabilities = wide("decode", "extend")

    def scores(self, q, k, layer):
        return super().scores(q[..., :64], k[..., :64], layer)

    def finish(self, out, rows):
        return torch.cat([out[..., :64], torch.zeros_like(out[..., 64:])], -1)


@bug(
    4,
    "vllm #23424",
    "extend-gqa32x2-d64-bf16-p1-k3-n3a3-reversed-gauss-layers1from0-b1stale",
    "completes",
    of_a_tier="extend-gqa32x2-d64-bf16-p1-k7x2-n6a11.1-interleaved-gauss-b3nan",
)
class MoreThan16Queries(Known):
    """BLOCK_Q = 16 // queries_per_kv, which is divided by."""

    capabilities = wide("decode", "extend", heads={"gqa_ratios": {2, 8, 32}})

    def run(self, q, kv, plan):
        block_q = 16 // plan.layer.q_per_kv
        self.grid = len(q) // block_q + len(plan.kv_lens)
        return super().run(q, kv, plan)


@bug(4, "sglang #32625", "decode-gqa2x4-d128-bf16-p16-k600.40.4-shuffled-gauss-layers3from5by4x2d64.8x4d128-b4prod")
class PlanOfFirstHeads(Known):
    """Planned with one head count; what is behind the planned work is not computed."""

    capabilities = wide("decode", "extend", heads={"heads_by_layer": True})

    def finish(self, out, rows):
        planned = self.context.layers[0].tp_q_head_num
        t, h, _ = out.shape
        out[t * min(planned, h) // h :] = 0
        return out


@bug(
    4,
    "sglang #30340",
    "decode-gqa2x2-d64-bf16-p64-k1087.1088.1089-contiguous-one_hot-layers2from5-"
    "b6stale-empty_batches-overlap_scheduling",
    "completes",
)
class LayerZeroAtInit(Known):
    """The constructor asks the pool for layer 0."""

    capabilities = wide("decode", "extend")

    def __init__(self, context):
        super().__init__(context)
        self.v_head_dim = context.kv_pool.get_value_buffer(0).shape[-1]


@bug(5, "HipKittens #22", "decode-gqa8x2-d64-bf16-p16-k7x2-contiguous-shifted-b3nan", "output-written")
@bug(
    1,
    "HipKittens #22",
    "extend-gqa4x2-d64-bf16-p16-k0.1.16-n11a15.16.2-shared-shifted-b3prod",
    "output-written",
    of_a_tier="decode-gqa8x2-d64-bf16-p16-k7x2-contiguous-shifted-b3nan",
)
class SquareGroups(Tiled):
    """Blocks are given heads as if there were as many KV heads as heads in a group: some heads have no block."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4, 8}})

    def finish(self, out, rows):
        heads, group = out.shape[1], rows.layer.q_per_kv
        block = torch.arange(heads, device=out.device)
        head = block % group * group + block // group
        done = (block[:, None] == head).any(1)
        return torch.where(done[:, None], out, torch.empty_like(out))


@bug(5, "vllm #46952", "decode-mla32-d512r64-bf16-p16-k70.33.1-shuffled-gauss-kvfp8e4m3-layers1from0-b3prod")
class FoldedHeads(Latent):
    """Rows of 32 heads are folded to two of 16 with FP8, and unfolded in the wrong order."""

    capabilities = mla_capabilities(
        "decode", "target-verify", heads={"gqa_ratios": {16, 32, 64}}, kv_pool={"kv_dtypes": FP8}
    )

    def finish(self, out, rows):
        t, h, d = out.shape
        if h != 32 or self.context.kv_pool.dtype.itemsize != 1:
            return out
        return out.reshape(2, t, 16, d).transpose(0, 1).reshape(t, h, d)


@bug(6, "ONNXim #34", "decode-mha2-d128-bf16-p1-k7.8.9-shared-rising_logits-b4stale")
@bug(
    1,
    "ONNXim #33",
    "extend-gqa4x2-d64-bf16-p16-k0.1.16-n11a15.16.2-shared-shifted-b3prod",
    of_a_tier="decode-mha2-d128-bf16-p1-k7.8.9-shared-rising_logits-b4stale",
)
class HeadByKvHeads(Tiled):
    """A query head's KV head is head // number of KV heads, in place of head // group."""

    capabilities = wide_capabilities("decode", "extend")

    def kv_head(self, layer, device):
        head = torch.arange(layer.tp_q_head_num, device=device) // layer.tp_k_head_num
        return head.clamp(max=layer.tp_k_head_num - 1)


@bug(6, "vllm #42650", "decode-gqa2x4-d64-bf16-p16-k39.70.6-reversed-gauss-layers3from5by4x2d64.8x4d64-b4prod")
class HeadsOfModel(Tiled):
    """Groups of query heads are planned by the first layer's number of heads, where layers differ."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}, "heads_by_layer": True})

    def kv_head(self, layer, device):
        group = max(self.context.layers[0].tp_q_head_num // layer.tp_k_head_num, 1)
        head = torch.arange(layer.tp_q_head_num, device=device) // group
        return head.clamp(max=layer.tp_k_head_num - 1)


@bug(6, "vllm flash-attention #87", "decode-gqa2x2-d64-bf16-p16-k1500.70-shared-gauss-lsewhole-b3prod", "log-sum-exp")
class LseTransposed(WithKVSplits):
    """Where keys are split in decode, groups of heads are folded into rows, and log-sum-exps keep the folded order."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        rows = self.rows_of(q, plan)
        folded = lse.view(len(q), -1, plan.layer.q_per_kv).transpose(1, 2).reshape(lse.shape)
        split = (rows.kv_lens > _SPLIT_FROM) & (rows.new == 1)
        return out, torch.where(split[:, None], folded, lse)


@bug(
    12, "flashinfer #5245", "extend-gqa2x2-d64-bf16-p16-k70.0.33-n1a1x3-reversed-gauss-lseprefix-b3prod", "log-sum-exp"
)
class LseOfTheFirstHead(WithKVSplits):
    """Where every request has one row, the first query head of a KV head alone gets its log-sum-exp."""

    capabilities = declared(
        "extend", kv_pool={"page_sizes": {16}}, lse=LogSumExp(base="e", whole={"extend"}, prefix={"extend"})
    )

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        first = torch.arange(q.shape[1], device=q.device) % plan.layer.q_per_kv == 0
        lost = (plan.cu_seqlens_q.diff() <= 1).all() & ~first
        return out, torch.where(lost, 0.0, lse)


# vllm #46997: split and reduce metadata of FP8 MLA are made as for a pool in bf16.
@bug(16, "vllm #46997", "decode-mla32-d512r64-bf16-p16-k70.33.1-shuffled-gauss-kvfp8e4m3-layers1from0-b3prod")
class MetadataOfUnfolded(Native):
    """32 heads run as two requests of 16, whose partial results are counted by the list of the real requests."""

    SPLIT = 64
    capabilities = wide("decode", "extend", **MLA).with_changes(
        heads={"gqa_ratios": {16, 32}}, kv_pool={"kv_dtypes": FP8}
    )

    def _masked(self, logits, seen, layer):
        logits = super()._masked(logits, seen, layer)
        if not self.mode.is_decode() or not self.is_fp8() or layer.tp_q_head_num != 32:
            return logits
        requests = len(logits)
        splits = -(-(self._last_key[:, 0] + 1) // self.SPLIT)
        folded = 2 * torch.arange(requests, device=logits.device)[:, None] + torch.arange(2, device=logits.device)
        reduced = splits[folded.clamp(max=requests - 1)] * self.SPLIT
        lost = self._key >= reduced.repeat_interleave(16, 1)[..., None]
        return logits.masked_fill(lost[:, None, :, None], -torch.inf)
