"""Rows of formats, scales and layouts; bugs of the eighteenth set.

The number before each class is that of ``eighteenth_set.md``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from eighteenth_parents import Packs, ReadsByOffset

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparsePackedBackend
from attn_testkit.contract import ForwardMode
from attn_testkit.contract.row_format import INT4, POWER_OF_TWO
from attn_testkit_corpus.faults.catalogue import bug

LONG = 8192


# 29, vllm #45361: the store converts floats to integers, which cuts them off.
@bug(
    "vllm #45361",
    "decode-gqa8x2-d128-bf16-p128-k127.128.129-shared-peaked-kvint8pertokenhead-kvpaddedpages-w4000-cap1.5-sink-lseprefix-b3prod",
    "writes-own-kv",
)
class IntegersCutOff(Packs):
    """Integers of 8 bits are cut off toward zero."""

    def codes(self, numbers, dtype):
        return super().codes(numbers.trunc() if dtype == torch.int8 else numbers, dtype)


# 30, imp #250: ``inv_sc = 1.0f / sc`` of the scale before it is rounded.
@bug(
    "imp #250",
    "extend-gqa8x2-d256-bf16-p128-k600.70.12-n45a131.1x2-shuffled-shifted-kvfp4mxblock16-kvpaddedpages-w11-alibi-qqbias-layers2from0groups-b4stale-freed_null_page",
    "writes-own-kv",
)
class DividedByExactScale(Packs):
    """Numbers are divided by the exact scale, and a power of two is stored."""

    def divisors(self, form, plane, keys):
        if plane.dtype == POWER_OF_TWO:
            return form.exact_scales(plane, keys)
        return super().divisors(form, plane, keys)


# 31, aiter #3212: E8M0 scales are rounded at half of the mantissa.
@bug(
    "aiter #3212",
    "extend-gqa8x2-d256-bf16-p128-k600.70.12-n45a131.1x2-shuffled-shifted-kvfp4mxblock16-kvpaddedpages-w11-alibi-qqbias-layers2from0groups-b4stale-freed_null_page",
    "writes-own-kv",
)
class ScaleToNearestPower(Packs):
    """The power of two of a scale is the nearest one."""

    def scales(self, form, plane, keys):
        if plane.dtype != POWER_OF_TWO:
            return super().scales(form, plane, keys)
        exact = form.exact_scales(plane, keys)
        return ((exact.view(torch.int32) + 0x400000) & 0x7F800000).view(torch.float32)


# 32, FlagAttention #46: ``k_ptrs`` with ``stride_vn``, and ``v_ptrs`` with ``stride_kn``.
@bug(
    "FlagAttention #46",
    "extend-mqa4-d32r64-fp32-p128-k600.70.12-n2a2.3.1-contiguous-mean-cross261-cap1.5-layers2from5-b6small",
    "reads-own-kv",
)
class StridesExchanged(ReadsByOffset):
    """Rows of K are as far apart as those of V, and those of V as those of K."""

    def widths(self, layer):
        return layer.v_head_dim, layer.head_dim


# 33, vllm #48611: short prefills take a path that gathers rows as FP8 numbers with one scale.
@bug(
    "vllm #48611",
    "extend-mla2-d128r64-bf16-p1-k5.0.1x2.70-n2a2.1.2.1.2-interleaved-gauss-kvfp8dsmlapow2-sel16-lsewhole-b6prod",
    "log-sum-exp",
)
class ShortPrefillsAreFlat(TorchNativeSparsePackedBackend):
    """Prefills whose contexts are at most topk read packed rows as FP8 numbers."""

    capabilities = TorchNativeSparsePackedBackend.capabilities.with_changes(
        graph=frozenset(ForwardMode) - {ForwardMode.EXTEND}
    )
    longest = 0

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.longest = 0
        if batch.forward_mode is ForwardMode.EXTEND:
            pairs = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
            self.longest = max((sum(pair) for pair in pairs), default=0)

    def read(self, kv, slot, layer):
        if not 0 < self.longest <= layer.topk:
            return super().read(kv, slot, layer)
        rows = kv[0].flatten(0, 1)[slot][..., : layer.head_dim].contiguous().view(torch.float8_e4m3fn)
        keys = rows.float() * layer.k_scale
        return keys, keys[..., : layer.kv_lora_rank]


# 34, vllm #49011: a slice of heads is taken for a block of numbers that is followed by a block of scales.
@bug(
    "vllm #49011",
    "decode-gqa8x2-d32-bf16-p128-k7x2-shared-rising_logits-kvint8pertokenhead-kvsidebysidehnd-w11-alibi-layers2from0groups-b2prod-padded_tokens-freed_null_page",
    "finite",
)
class NumbersBeforeScales(TorchNativeFormatsBackend):
    """Scales in a row are looked for behind the numbers of all heads."""

    def _rows(self, part, places, layer):
        rows, form = super()._rows(part, places, layer), self.context.kv_pool.rows_of(layer)
        if form.format.apart or not form.scale_planes:
            return rows
        scales = sum(plane.nbytes(layer.head_dim) for plane in form.scale_planes)
        whole, heads = rows.flatten(-2), rows.shape[-2]
        numbers, behind = whole.split([whole.shape[-1] - heads * scales, heads * scales], -1)
        return torch.cat([numbers.unflatten(-1, (heads, -1)), behind.unflatten(-1, (heads, -1))], -1)


# 35, flashinfer #4976: FP8 prefill with rows of 192 and 128 numbers.
@bug(
    "flashinfer #4976",
    "extend-gqa2x2-d32r64-bf16-p4-k7x2-n69a7.130-chunks3-reversed-gauss-kvfp8e4m3-w4-cap1.5-sink-layers1from0-lsewhole-b2prod-noncausal-bothsides",
    "reads-own-kv",
)
class ValuesAsWideAsKeys(ReadsByOffset):
    """A prefill over an FP8 pool finds rows of V as if they were as wide as keys."""

    def widths(self, layer):
        is_fp8 = self.context.kv_pool.dtype.itemsize == 1
        wide = self.mode is ForwardMode.EXTEND and is_fp8
        return layer.head_dim, layer.head_dim if wide else layer.v_head_dim


# 36, rMLX #374: ``code_float = raw - 2^(bits-1)`` from 8,192 keys on.
@bug("rMLX #374", "decode-gqa2x2-d32-bf16-p1-k16500.70-shuffled-gauss-kvint4group8-layers1from0-b2prod")
class OtherZeroOfLong(TorchNativeFormatsBackend):
    """In a decode of 8,192 keys and more, numbers of 4 bits of V have another zero."""

    decodes = False

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.decodes = batch.forward_mode is ForwardMode.DECODE

    def _numbers(self, rows, part, layer):
        form = self.context.kv_pool.rows_of(layer)
        plane = form.format.planes[0]
        if part == 1 and self.decodes and plane.dtype == INT4:
            first, end = form.offsets[plane.name]
            moved = torch.cat([rows[..., first:end] ^ 0x88, rows[..., end:]], -1)
            rows = torch.where((self._held >= LONG)[..., None, None], moved, rows)
        return super()._numbers(rows, part, layer)


# 37, aiter #5535: ``v_exp_f32``, and then a conversion to e4m3.
@bug(
    "aiter #5535",
    "decode-mla2-d256r32-fp32-p128-k133-contiguous-mean-kvfp8e4m3-kvlayersinblock-w4-cap1.5-sink-lsetokens3merged-b2stale",
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
@bug("vllm #37054", "decode-mqa4-d32-bf16-p16-k9.70.1-contiguous-gauss-b4prod-unusedscales")
class ScalesOfCheckpoint(TorchNativeFormatsBackend):
    """The scales of a checkpoint are applied to a pool without scales."""

    def _attend(self, q, layer, seen):
        return TorchNativeBackend._attend(self, q, layer, seen)


# 39, vLLM-Kunlun #365: ``reshape_and_cache_flash(..., BLHD_LAYOUT=False)`` is right for one head.
@bug(
    "vLLM-Kunlun #365",
    "extend-gqa8x2-d32-bf16-p4-k9.6.3-n4a4.3.4-shuffled-gauss-kvlayersinblock-b4prod",
    "writes-own-kv",
)
class ValuesHeadsFirst(TorchNativeBackend):
    """V is stored as if the heads of a page came before its tokens."""

    def _store(self, k, v, layer, batch, save_kv_cache):
        size, heads = self.context.page_size, layer.tp_k_head_num
        if not save_kv_cache or layer.is_cross_attention or layer.kv_lora_rank or heads == 1:
            return super()._store(k, v, layer, batch, save_kv_cache)
        group = self.context.group_of(layer)
        slots = group.cache_loc(batch).clamp(min=0).long()
        values = group.kv_pool.get_kv_pages(layer.layer_id)[1]
        values = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
        page, place = slots // size, slots % size
        before = values[page, place].clone()
        super()._store(k, v, layer, batch, save_kv_cache)
        rows = values[page, place].clone()
        values.index_put_((page, place), before)
        at = torch.arange(heads, device=values.device) * size + place[:, None]
        values.index_put_((page[:, None].expand_as(at), at // heads, at % heads), rows)
        return None


# 40, flashinfer #3097: ``v_scale`` is accepted and never read.
@bug(
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
