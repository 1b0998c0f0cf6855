"""Where something is read or written: pages, heads, strides, slots; bugs of the fourth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fourth_parents import SPEC, Known, wide
from third_parents import Latent, mla_capabilities

from attn_testkit_corpus.faults.catalogue import bug


@bug("LMCache #3092", "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod", "reads-own-kv")
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


@bug("vllm #51088", "decode-mla12-d512r64-bf16-p1-k21.3-shuffled-gauss-b2prod")
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


@bug("triton #621", "decode-gqa4x2-d128-bf16-p64-k3.133.33.17-contiguous-shifted-b7small")
class HeadDim64Only(Known):
    """64 is hard-coded."""

    capabilities = wide("decode", "extend")

    def scores(self, q, k, layer):
        return super().scores(q[..., :64], k[..., :64], layer)

    def finish(self, out, rows):
        return torch.cat([out[..., :64], torch.zeros_like(out[..., 64:])], -1)


@bug("ipex-llm #12619", "decode-gqa4x2-d80-bf16-p1-k600.70.12-reversed-shifted-usualscale-b3prod")
class PaddedHeadDimScale(Known):
    """The scale of the padded head dim."""

    capabilities = wide("decode", "extend", heads={"head_dims": {80, 96, 128}}, options={"any_scaling": False})

    def scores(self, q, k, layer):
        padded = next(n for n in (64, 128, 256) if n >= layer.head_dim)
        return super().scores(q, k, replace(layer, scaling=padded**-0.5))


@bug(
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


@bug(
    "sglang #7462",
    "extend-gqa2x2-d64-bf16-p16-k3-n3a3-reversed-gauss-layers1from0-b1prod",
    of_a_tier="extend-gqa2x2-d64-bf16-p16-k7x2-n18a35.1-shuffled-peaked-b3nan",
)
class ContiguousQuery(Known):
    """The query is taken as contiguous."""

    capabilities = wide("decode", "extend")

    def query(self, q, plan):
        _, h, d = q.shape
        return torch.as_strided(q, q.shape, (h * d, d, 1), q.storage_offset())


@bug("aiter #4531", "decode-gqa4x2-d128-bf16-p16-k21-interleaved-rising_logits-kvsidebysidehnd-b4prod", "writes-own-kv")
class ContiguousCacheWrite(Known):
    """The write takes the block stride alone; token and head strides are those of NHD."""

    capabilities = wide("decode", "extend", kv_pool={"page_sizes": {16}, "kv_layouts": {"nhd", "side-by-side-hnd"}})

    def write_kv(self, k, v, plan):
        pages = self.context.group_of(plan.layer).kv_pool.get_kv_pages(plan.layer.layer_id)
        size, loc = plan.page_size, plan.out_cache_loc.long()
        for side, new in zip(pages, (k, v), strict=True):
            _, _, h, d = side.shape
            as_nhd = side.as_strided(side.shape, (side.stride(0), h * d, d, 1), side.storage_offset())
            as_nhd.index_put_((loc // size, loc % size), new.reshape(len(loc), h, d).to(side.dtype))


@bug("vllm #47783", "decode-mla16-d512r64-bf16-p16-k33.24.3-shuffled-gauss-kvlayersinblock-b4prod", "reads-own-kv")
class FlatTokenStride(Latent):
    """Base + slot * token stride; the page stride is ignored."""

    capabilities = mla_capabilities(
        "decode", kv_pool={"page_sizes": {16, 64}, "kv_layouts": {"nhd", "layers-in-block"}}
    )

    def keys(self, kv, slots, plan):
        found = []
        for side in kv:
            pages, size, h, d = side.shape
            flat = side.as_strided((pages * size, h, d), (side.stride(1), side.stride(2), 1), side.storage_offset())
            found.append(flat[slots])
        return tuple(found)


@bug(
    "tokenspeed #522", "decode-gqa2x2-d128-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool", "reads-own-kv"
)
class NarrowOffset(Known):
    """Page * page stride overflows; scaled to 256 pages."""

    capabilities = wide("decode", kv_pool={"page_sizes": {16}})

    def slots(self, plan):
        offset = torch.arange(plan.page_size, device=plan.page_table.device)
        return (plan.page_table.long()[:, :, None] % 256 * plan.page_size + offset).flatten(1)


@bug(
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


@bug("vllm-rbln #326", "target-verify-gqa4x2-d128-bf16-p64-k63.64.65-chain7-shared-negative-b6nan", "writes-own-kv")
class SpecStoreInOneBlock(Known):
    """All tokens of a step are stored in one physical block."""

    capabilities = wide("decode", "target-verify", kv_pool={"page_sizes": {16, 64}})

    def write_kv(self, k, v, plan):
        if self.mode == "target-verify":
            n, loc = plan.max_q_len, plan.out_cache_loc
            first = loc.view(-1, n)[:, :1]
            loc = (first + torch.arange(n, device=loc.device)).flatten()
            most = self.context.kv_pool.num_slots - 1
            plan = replace(plan, out_cache_loc=loc.clamp(max=most))
        super().write_kv(k, v, plan)


@bug("onnxruntime #31641", "target-verify-gqa2x2-d128-bf16-p16-k0.1.16-chain7-shuffled-peaked-b3prod", "writes-own-kv")
class ShiftedAppend(Known):
    """T - 1 is taken as the past of several tokens."""

    capabilities = wide("decode", "target-verify")

    def write_kv(self, k, v, plan):
        if self.mode == "target-verify":
            n = plan.max_q_len
            at = (plan.kv_lens.long() - 1)[:, None] + torch.arange(n, device=k.device)
            at = at.clamp(0, plan.slot_table.shape[1] - 1)
            plan = replace(plan, out_cache_loc=plan.slot_table.gather(1, at).flatten().long())
        super().write_kv(k, v, plan)


@bug("tokenspeed #1441", "draft-extend-gqa4x2-d128-bf16-p1-k7.8.9-n4a1x3-interleaved-mean-b6nan", "writes-own-kv")
class DraftRowsNotStored(Known):
    """The first draft step has no write locations."""

    capabilities = wide(*SPEC)

    def write_kv(self, k, v, plan):
        if self.mode not in ("draft-extend", "draft-extend-v2"):
            super().write_kv(k, v, plan)
