"""Scales of K and V, and precision of FP8."""

from __future__ import annotations

from dataclasses import replace

import torch
from parents_formats import Fp8, Fp8PerHead, Int8PerTokenHead, PackedKV
from parents_launchers import Known, wide
from parents_native import MLA, Native
from plain_backends import FP8, ONLY_FP8, SMALLEST, Tiled, declared, wide_capabilities

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.contract import ROW_FORMATS, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.dense import DenseBackend
from attn_testkit_corpus.faults.row_formats import RowFormatsBackend


@bug(1, "sglang #34765", "decode-mla16-d512r64-bf16-p1-k7.8.9-shared-one_hot-kvfp8e4m3-b3prod", "writes-own-kv")
class Fp8LatentWrittenUnscaled(Tiled):
    """A latent of FP8 is written with scale 1, and read with the scale of keys in the first product alone."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {4, 16}, "head_dims": {512}},
        kv_pool={"kv_dtypes": {"fp8_e4m3", "same"}},
    )

    def write_kv(self, k, v, plan):
        pool = self.context.group_of(plan.layer).kv_pool
        pool.set_kv_buffer(replace(plan.layer, k_scale=1.0, v_scale=1.0), plan.out_cache_loc, k, v)

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, v_scale=1.0)))


@bug(
    2, "FreeToken #103", "decode-gqa2x2-d64-fp32-p1-k3x45.1x43.9x44-reversed-gauss-kvfp8e4m3-b132prod", "writes-own-kv"
)
class Fp8RoundedTwice(Tiled):
    """Rows are cut off to fp16 before they are rounded to FP8: quotients of bf16 rows never show it."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": ONLY_FP8}, precision={"dtypes": {"fp16", "fp32"}})

    def write_kv(self, k, v, plan):
        layer = plan.layer

        def rounded(rows, scale):
            x = (rows.float() / scale).clamp(-448, 448)
            cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
            return cut.to(torch.float8_e4m3fn).float()

        pool = self.context.group_of(layer).kv_pool
        once = replace(layer, k_scale=1.0, v_scale=1.0)
        pool.set_kv_buffer(once, plan.out_cache_loc, rounded(k, layer.k_scale), rounded(v, layer.v_scale))


@bug(2, "vLLM #45720", "decode-gqa2x2-d64-bf16-p1-k7.8.9-reversed-gauss-kvfp8e4m3-b3prod", "finite")
class FnuzBytes(Tiled):
    """The pool's bytes are read as another FP8 format, in which they are half as much."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": ONLY_FP8})

    def keys(self, kv, slots, plan):
        found = super().keys(tuple(side.view(torch.uint8) for side in kv), slots, plan)
        return tuple(side.view(torch.float8_e4m3fnuz).float() for side in found)


@bug(2, "vLLM #42580", "decode-gqa2x2-d64-bf16-p1-k7.8.9-reversed-gauss-kvfp8e4m3-b3prod")
class DescaleDroppedForFp8Queries(Tiled):
    """With queries of FP8 the scales of K and V are not applied."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": ONLY_FP8}, precision={"matmul_dtype": "fp8_e4m3"})

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, k_scale=1.0, v_scale=1.0)))


@bug(3, "ninfer-3090 #49", "decode-mha2-d64-bf16-p1-k32.128.64.16.63-interleaved-one_hot-kvfp8e4m3-b5prod")
class TileDequantisedBeforeItArrived(Tiled):
    """FP8 tiles are converted before all bytes are there: the last quarter is that of the tile before."""

    capabilities = wide_capabilities("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        if self.context.kv_pool.dtype.itemsize == 1:
            index = torch.arange(slots.shape[1], device=slots.device)
            late = (index >= 64) & (index % 64 >= 48)
            slots = slots[:, torch.where(late, index - 64, index)]
        return super().keys(kv, slots, plan)


@bug(3, "aiter #5642", "extend-mha1-d64-bf16-p1-k9.70-n2a2x2-interleaved-gauss-kvfp8e4m3-b3prod")
class NormalisedBeforeFp8(Tiled):
    """Weights are divided by their sum before they are rounded to FP8: many become subnormal."""

    TILE = 256
    capabilities = wide_capabilities(
        "decode", "extend", kv_pool={"kv_dtypes": {"fp8_e4m3"}}, precision={"matmul_dtype": "fp8_e4m3"}
    )

    def weigh(self, p, v):
        total = p.sum(-1, keepdim=True).clamp(min=SMALLEST)
        return super().weigh((p / total).to(torch.float8_e4m3fn).float() * total, v)


@bug(4, "tokenspeed #759", "decode-gqa2x2-d128-bf16-p1-k1500.70-contiguous-gauss-kvfp8e4m3-b3prod")
class ScalesNotApplied(Known):
    """The FA4 path gets no scales."""

    capabilities = wide("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, k_scale=1.0, v_scale=1.0)))


@bug(5, "vllm #55670", "extend-gqa2x2-d64-bf16-p1-k600.70.12-n5a11.1x2-chunks3-shuffled-peaked-kvfp8e4m3-b3prod")
class Fp8Scratch(Tiled):
    """With an FP8 pool outputs go through FP8 memory, without its scale."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def finish(self, out, rows):
        if self.context.kv_pool.dtype.itemsize != 1:
            return out
        return out.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(out.dtype)


@bug(6, "sglang #26852", "decode-gqa2x2-d64-bf16-p16-k15.16.17-interleaved-gauss-kvfp8e4m3-b3prod")
class VScaleFallsToK(Tiled):
    """The scale of V falls back to that of K."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def run(self, q, kv, plan):
        return super().run(q, kv, replace(plan, layer=replace(plan.layer, v_scale=plan.layer.k_scale)))


@bug(6, "vllm #48016", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n6a9.7.1-chunks3-shared-negative-kvfp8e4m3-b4small")
class ScalesTwice(Tiled):
    """Prefill dequantises K and V by their scales, and gives the scales to the kernel again."""

    capabilities = declared("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        k, v = super().keys(kv, slots, plan)
        if plan.max_q_len == 1:
            return k, v
        return k.float() * plan.layer.k_scale, v.float() * plan.layer.v_scale


@bug(6, "sglang #24198", "extend-gqa2x2-d64-bf16-p1-k7.8.9-n6a9.7.1-chunks3-shared-negative-kvfp8e4m3-b4small")
class PagedPartNoScales(Tiled):
    """Of the two calls of a prefill, that for the prefix has no scales."""

    capabilities = declared("extend", kv_pool={"kv_dtypes": FP8})

    def keys(self, kv, slots, plan):
        k, v = (side.float() for side in super().keys(kv, slots, plan))
        rows = self.rows_of(slots, plan)
        index = torch.arange(slots.shape[1], device=slots.device)
        cached = (index < rows.prefix[:, None])[..., None, None]
        return torch.where(cached, k / plan.layer.k_scale, k), torch.where(cached, v / plan.layer.v_scale, v)


@bug(14, "vllm #51091", "decode-gqa2x2-d128-bf16-p16-k0.1.16-shuffled-gauss-kvfp8pertokenhead-b4nan", "writes-own-kv")
class ScalesSetAtFirstTouch(PackedKV):
    """The last layer sets the scales of the pool that it takes for its own, the first layer's, in its first forward."""

    touched = False

    def run(self, q, kv, plan):
        if plan.layer.layer_id == self.context.layers[-1].layer_id and not self.touched:
            self.touched = True
            for plane in self.scale_planes(self.context.layers[0]):
                plane.fill_(1.0)
        return super().run(q, kv, plan)


@bug(14, "sgl-kernel-xpu #252", "decode-gqa2x2-d64-bf16-p16-k15.16.17-interleaved-rising_logits-kvfp8perhead-b3prod")
class FirstScaleOfAll(PackedKV):
    """The scale of the first head is that of each head."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_head"}})

    def head_scales(self, layer):
        return tuple(scales[:1].expand_as(scales) for scales in super().head_scales(layer))


@bug(
    15,
    "vllm-xpu-kernels #475",
    "decode-mla16-d128r64-fp16-p16-k0.1.16-contiguous-shifted-kvfp8e4m3-b3prod",
    "writes-own-kv",
)
class MultipliesByScale(DenseBackend):
    """The FP8 writer of MLA multiplies by the scale, and does not saturate."""

    capabilities = DenseBackend.capabilities.with_changes(
        heads={"families": {"mla"}, "gqa_ratios": {16}, "head_dims": {128, 512}},
        kv_pool={"kv_dtypes": {"fp8_e4m3"}, "page_sizes": {16, 64}},
    )

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if save_kv_cache:
            buffer, slots = self.context.kv_pool.get_key_buffer(layer.layer_id), batch.out_cache_loc.long()
            rows = (k.reshape(len(k), 1, -1).float() * layer.k_scale).to(buffer.dtype)
            buffer.view(torch.uint8)[slots] = rows.view(torch.uint8)
        return super().forward(q, k, v, layer, batch, False)


@bug(15, "InfiniLM #553", "decode-mqa4-d128-bf16-p64-k69-reversed-mean-kvfp8perhead-w46-b1prod", "writes-own-kv")
class ScalesOfConstructor(RowFormatsBackend):
    """Scales of heads are those that the constructor saw."""

    capabilities = RowFormatsBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_head"}})

    def __init__(self, context):
        super().__init__(context)
        self.seen = {
            layer.layer_id: tuple(
                None if each is None else each.clone() for each in (layer.k_head_scales, layer.v_head_scales)
            )
            for layer in context.layers
        }

    def head_scales(self, part, layer):
        return self.seen[layer.layer_id][part]

    def write_kv(self, layer, k, v, meta):
        k_scales, v_scales = self.seen[layer.layer_id]
        super().write_kv(replace(layer, k_head_scales=k_scales, v_head_scales=v_scales), k, v, meta)


# TensorRT-LLM #16916: the generation of MLA passes None for both KV scales. The mechanism is a guess.
@bug(
    16,
    "TensorRT-LLM #16916",
    "decode-mla16-d512r64-bf16-p64-k133.3.0.64.9.33.1.17.5-reversed-one_hot-kvfp8e4m3-b9prod",
    "writes-own-kv",
)
class NoScalesInDecode(Native):
    """A decode of MLA stores and reads FP8 rows as if their scale was 1."""

    capabilities = wide("decode", "extend", **MLA).with_changes(
        heads={"gqa_ratios": {8, 16}}, kv_pool={"kv_dtypes": FP8}
    )

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, out=None):
        if batch.forward_mode.is_decode() and self.is_fp8():
            layer = replace(layer, k_scale=1.0, v_scale=1.0)
        return super().forward(q, k, v, layer, batch, save_kv_cache, out)


# vllm #48016: the copy that a prefill reads has its scales applied, and the kernel applies them again.
@bug(16, "vllm #48016", "extend-gqa4x2-d128-bf16-p16-k1.2.5.9.14.2.30-n1a1x7-chunks3-shared-gauss-kvfp8e4m3-b10prod")
class PrefillScalesTwice(Native):
    """A prefill over FP8 multiplies by the scales of K and V twice."""

    capabilities = wide("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def _attend(self, q, layer, seen):
        if self.mode == "extend" and self.is_fp8():
            layer = replace(layer, k_scale=layer.k_scale**2, v_scale=layer.v_scale**2)
        return super()._attend(q, layer, seen)


# 63: sgl-kernel-xpu #305. Only the split path folds the descales in. The thread does not say from which length on keys
# are split; here a batch whose longest context has more than 512 keys is.
@bug(16, "sgl-kernel-xpu #305", "decode-mha2-d64-bf16-p128-k7x2-shuffled-gauss-kvfp8e4m3-b5prod")
class DecodeWithoutSplits(Fp8):
    """A decode of short contexts leaves out the scales of K and V."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.decodes = batch.forward_mode.is_decode()
        if batch.batch_size:
            self.unsplit = batch.seq_lens[: batch.batch_size].max() <= 512

    def _attend(self, q, layer, seen):
        out, logits = super()._attend(q, layer, seen)
        if not self.decodes:
            return out, logits
        plain, _ = super()._attend(q, replace(layer, k_scale=1.0, v_scale=1.0), seen)
        return torch.where(self.unsplit, plain, out), logits


# 64: FreeToken #309. Scales are not handed to the kernel.
@bug(
    16,
    "FreeToken #309",
    "draft-decode-mha2-d128-bf16-p16-k21-topk1steps4-shared-rising_logits-kvint8pertokenhead-w0-b1prod",
)
class IntegersWithoutScales(Int8PerTokenHead):
    """Attention takes the integers for keys and values."""

    def _numbers(self, rows, part, layer):
        return rows[..., : layer.head_dim].contiguous().view(torch.int8).float().transpose(1, 2).contiguous()


# 65: vllm #51363. The call of FA4 drops ``k_descale`` and ``v_descale``; that of FA3 has them.
@bug(16, "vllm #51363", "decode-mha2-d128-bf16-p16-k21-reversed-mean-kvfp8perhead-w11-b2prod")
class PathWithoutHeadScales(Fp8PerHead):
    """Attention leaves out the scales of heads, by which the writer divided."""

    def _numbers(self, rows, part, layer):
        return super()._numbers(rows, part, replace(layer, k_head_scales=None, v_head_scales=None))


# 67: mlxcel #717. ``maximum(absmax / 127, 1.0)`` in the path of a single stream; batches are quantized elsewhere.
@bug(
    16,
    "mlxcel #717",
    "draft-decode-mha2-d128-bf16-p16-k21-topk1steps4-shared-rising_logits-kvint8pertokenhead-w0-b1prod",
    "writes-own-kv",
    execution="graph",
)
class ScaleAtLeastOne(Int8PerTokenHead):
    """The scales of a batch of one request are 1 at least."""

    def packed_of(self, layer, batch):
        packed = super().packed_of(layer, batch)
        if batch.batch_size != 1:
            return packed
        form = ROW_FORMATS["int8_per_token_head"]
        numbers, scales = form.planes
        return replace(packed, format=replace(form, planes=(numbers, replace(scales, smallest=1.0))))


# 37, aiter #5535: ``v_exp_f32``, and then a conversion to e4m3.
@bug(
    18,
    "aiter #5535",
    "decode-mla2-d32r32-fp32-p128-k600.70.12-contiguous-mean-kvfp8e4m3-kvlayersinblock-w4-cap1.5-sink-lsetokens3merged-b4stale",
)
class NumeratorsInFp8(TorchNativeBackend):
    """A decode of MLA over an FP8 pool rounds the numerators of the softmax to e4m3, and their sum not."""

    rounds = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.rounds = batch.forward_mode is ForwardMode.DECODE and self.context.kv_pool.dtype.itemsize == 1

    def _sum(self, p, values, seen):
        if self.rounds and values.shape[1] == 1 and self.context.layers[0].kv_lora_rank:
            top = p.amax(-1, keepdim=True)
            p = (p / top).to(torch.float8_e4m3fn).float() * top
        return super()._sum(p, values, seen)


# 38, vllm #37054: ``layer._k_scale`` and ``layer._v_scale`` apply whatever the pool holds.
@bug(18, "vllm #37054", "decode-mqa4-d32-bf16-p16-k9.70.1-contiguous-gauss-b4prod-unusedscales")
class ScalesOfCheckpoint(TorchNativeFormatsBackend):
    """The scales of a checkpoint are applied to a pool without scales."""

    def _attend(self, q, layer, seen):
        return TorchNativeBackend._attend(self, q, layer, seen)


# 40, flashinfer #3097: ``v_scale`` is accepted and never read.
@bug(
    18,
    "flashinfer #3097",
    "extend-mqa4-d32-bf16-p16-k1061.1027.0.1040.9.33.1.17.5-n3a0.17.0x2.3.0.2.1x2-chunks3-contiguous-one_hot-kvnvfp4-kvinblock-w0-spans-cap1.5-sink-layers3from0varied-lsewhole-b10stale",
)
class PrefillWithoutVScale(TorchNativeFormatsBackend):
    """A prefill over NVFP4 rows does not apply the scale of V."""

    extends = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.extends = batch.forward_mode is ForwardMode.EXTEND

    def _attend(self, q, layer, seen):
        if self.extends and self.context.kv_pool.row_format == "nvfp4":
            layer = replace(layer, v_scale=1.0)
        return super()._attend(q, layer, seen)
