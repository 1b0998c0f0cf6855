"""Rows of formats with scales; bugs of the fifteenth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from bugs_fourteenth_formats import PackedKV

from attn_testkit_corpus.faults.catalogue import bug, helper
from attn_testkit_corpus.faults.dense import DenseBackend
from attn_testkit_corpus.faults.row_formats import RowFormatsBackend


@bug("flashinfer #3608", "decode-gqa2x2-d64-bf16-p16-k0.1.16-contiguous-rising_logits-kvnvfp4-b3prod", "reads-own-kv")
class ScalesByStridesOfNumbers(PackedKV):
    """Scales that lie apart are read with the strides of the numbers."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4"}, "kv_layouts": {"nhd"}})

    def scale_planes(self, layer):
        pool = self.pool_of(layer)
        pairs = zip(pool.get_kv_pages(layer.layer_id), pool.get_scale_pages(layer.layer_id), strict=True)
        return tuple(self.by_strides(numbers, scales) for numbers, scales in pairs)

    @helper
    def by_strides(self, numbers, scales):
        index = sum(
            torch.arange(size, device=scales.device).view(-1, *[1] * (3 - axis)) * step
            for axis, (size, step) in enumerate(zip(scales.shape, (*numbers.stride()[:3], 1), strict=True))
        )
        return scales.flatten()[index % scales.numel()].view(torch.float8_e4m3fn)


@bug(
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


@bug("InfiniLM #553", "decode-mqa4-d128-bf16-p64-k69-reversed-mean-kvfp8perhead-w46-b1prod", "writes-own-kv")
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


@bug(
    "aiter #4195",
    "decode-gqa2x2-d64-bf16-p16-k1.2.3.4.5.6.7.8.9.10.11.12.13-shuffled-gauss-kvfp8pertokenhead-b24prod",
    "writes-own-kv",
)
class ScaleOfZeros(PackedKV):
    """The scale of a row of zeros is 0, and zeros are divided by it."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_token_head"}})

    def write_kv(self, k, v, plan):
        layer, slots = plan.layer, plan.out_cache_loc.long()
        page, place = slots // plan.page_size, slots % plan.page_size
        for side, given in zip(self.pool_of(layer).get_planes(layer.layer_id), (k, v), strict=True):
            rows = given.reshape(len(given), layer.tp_k_head_num, -1).float()
            most = rows.abs().amax(-1, keepdim=True)
            scales = torch.where(most > 0, (most / 448).clamp(min=1e-6), 0.0)
            self.put(side["numbers"], page, place, (rows / scales).clamp(-448, 448))
            self.put(side["scales"], page, place, scales)


@bug("flashinfer #3838", "extend-gqa4x2-d128-bf16-p64-k0x3-n2a2.3.1-chunks3-reversed-one_hot-kvnvfp4-b6stale")
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
