"""Rows that hold their scales, and formats of numbers."""

from __future__ import annotations

import torch
from parents_formats import Fp8PerTokenHead, Int8Apart, Nvfp4, PackedKV, PackedMla, Packs, WritesScalesElsewhere

from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparsePackedBackend
from attn_testkit.contract import ForwardMode
from attn_testkit.contract.row_format import INT4, POWER_OF_TWO
from attn_testkit_corpus.faults.catalogue import bug, helper

MANY_KEYS = 8192


@bug(
    14,
    "vllm #49716",
    "decode-gqa4x2-d128-bf16-p16-k15.16.17-interleaved-rising_logits-kvint8pertokenhead-kvpaddedpages-b6nan",
    "writes-own-kv",
)
class StridesOfShape(WritesScalesElsewhere):
    """Strides of the scales in rows follow from the shape, as if pages lay one behind the other."""

    def scale_planes(self, layer):
        return tuple(self.by_shape(side) for side in self.pool_of(layer).get_kv_pages(layer.layer_id))

    @helper
    def by_shape(self, side):
        _, size, heads, width = side.shape
        rows = side.as_strided(side.shape, (size * heads * width, heads * width, width, 1), side.storage_offset())
        return rows[..., -4:].view(torch.float32)


@bug(14, "kvcached #435", "decode-gqa2x2-d128-bf16-p16-k0.1.16-shuffled-gauss-kvfp8pertokenhead-b4nan", "writes-own-kv")
class ScalesOfFirstLayer(WritesScalesElsewhere):
    """Views of scales have no offset of their layer: all layers have those of the first."""

    def scale_planes(self, layer):
        return super().scale_planes(self.context.layers[0])


@bug(
    14, "vllm #50085", "decode-gqa2x2-d64-bf16-p16-k15.16.17-interleaved-rising_logits-kvnvfp4-b3prod", "writes-own-kv"
)
class ScalesOfVSwizzled(PackedKV):
    """Scales of V are written in squares of 4 tokens by 4 scales, rows for columns, and read as they lie."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4"}, "kv_layouts": {"nhd", "hnd"}})

    def write_kv(self, k, v, plan):
        super().write_kv(k, v, plan)
        layer, slots = plan.layer, plan.out_cache_loc.long()
        page, place = slots // plan.page_size, slots % plan.page_size
        plane, (_, new) = self.scale_planes(layer)[1].view(torch.uint8), self.new_scales(layer, k, v)
        new = new.to(torch.float8_e4m3fn).view(torch.uint8)
        for column in range(new.shape[-1]):
            head = torch.arange(new.shape[1], device=new.device)
            row, to = (place // 4 * 4 + column % 4)[:, None], (column // 4 * 4 + place % 4)[:, None]
            plane[page[:, None], row, head, to] = new[..., column]


@bug(14, "lmdeploy #4850", "decode-gqa2x2-d96-bf16-p16-k0.1.16-shared-mean-kvint8pertokenhead-b3prod", "writes-own-kv")
class RangeOfMaskedLanes(PackedKV):
    """Where a row's width is no power of two, its range includes what lies behind it up to the next one."""

    capabilities = PackedKV.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"int8_per_token_head"}}, heads={"head_dims": {64, 96, 192}}
    )

    def write_kv(self, k, v, plan):
        layer, slots = plan.layer, plan.out_cache_loc.long()
        page, place = slots // plan.page_size, slots % plan.page_size
        for side, given in zip(self.pool_of(layer).get_planes(layer.layer_id), (k, v), strict=True):
            rows = given.reshape(len(given), layer.tp_k_head_num, -1).float()
            scales = self.widened(rows)
            self.put(side["numbers"], page, place, (rows / scales).round().clamp(-127, 127))
            self.put(side["scales"], page, place, scales)

    @helper
    def widened(self, rows):
        count, heads, width = rows.shape
        whole = 1 << (width - 1).bit_length()
        flat = torch.nn.functional.pad(rows.flatten(), (0, whole))
        seen = flat.unfold(0, whole, width)[: count * heads]
        return (seen.abs().amax(-1) / 127).clamp(min=1e-6).view(count, heads, 1)


@bug(
    15, "flashinfer #3608", "decode-gqa2x2-d64-bf16-p16-k0.1.16-contiguous-rising_logits-kvnvfp4-b3prod", "reads-own-kv"
)
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
    15,
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


# 60: vllm #50084. ``swizzle_scale_offset`` of trtllm-gen: scale s of token t of four lies at 4 s + t of their scales.
@bug(
    16,
    "vllm #50084",
    "draft-extend-gqa8x2-d256-bf16-p16-k1.2.5.9.14.2.30-n6a6x7-contiguous-mean-kvnvfp4-w4-b7prod",
    "writes-own-kv",
)
class ScalesOfFourTokens(Nvfp4):
    """Scales of values are stored with four tokens interleaved; numbers, and scales of keys, lie in linear order."""

    def put_scales(self, pool, part, rows, layer, slots):
        if part == 0:
            super().put_scales(pool, part, rows, layer, slots)
            return
        page, slot = self.places(slots)
        width = rows.shape[-1]
        flat = torch.arange(width, device=rows.device) * 4 + slot[:, None] % 4
        token, column = slot[:, None] // 4 * 4 + flat // width, flat % width
        scales = pool.get_scale_pages(layer.layer_id)[1].permute(0, 1, 3, 2)
        scales.index_put_((page[:, None].expand_as(token), token, column), rows.transpose(1, 2))


# 61: kvcached #424. ``get_kv_cache_shape`` without ``cache_dtype_str`` gives rows of D bytes instead of D + 4.
@bug(16, "kvcached #424", "decode-mha2-d128-bf16-p16-k21-reversed-mean-kvfp8pertokenhead-w11-b2prod", "writes-own-kv")
class StepsWithoutScales(Fp8PerTokenHead):
    """Numbers are written and read with steps of D bytes; scales lie where rows of D + 4 bytes have them."""

    @helper
    def narrow(self, rows, layer):
        """[pages, page_size, Hk, D] of [pages, page_size, Hk, D + 4]: the same memory with shorter steps."""
        pages, size, heads, _ = rows.shape
        d = layer.head_dim
        return rows.as_strided((pages, size, heads, d), (size * heads * d, heads * d, d, 1), rows.storage_offset())

    def put_numbers(self, pool, part, rows, layer, slots):
        pages, places = pool.get_kv_pages(layer.layer_id)[part], self.places(slots)
        self.narrow(pages, layer).index_put_(places, rows[..., : layer.head_dim])
        pages[..., layer.head_dim :].index_put_(places, rows[..., layer.head_dim :])

    def _rows(self, part, places, layer):
        pages = self.context.kv_pool.get_kv_pages(layer.layer_id)[part]
        return torch.cat([self.narrow(pages, layer)[places], pages[places][..., layer.head_dim :]], -1)


# 62: vllm #54563. ``pow2_fp32`` extracts the exponent of a scale that the writer stores as amax / 448.
@bug(
    16,
    "vllm #54563",
    "target-verify-mla2-d128r64-bf16-p64-k3.133.33.17-chain7-shared-gauss-kvfp8dsmla-sink-sel1-idx4reuse-b4prod",
)
class ScalesAsPowersOfTwo(PackedMla):
    """A scale counts as the power of two at or below it."""

    def read(self, kv, slot, layer):
        keys, _ = super().read(kv, slot, layer)
        packed = self.context.kv_pool.rows_of(layer)
        plane = packed.scale_planes[0]
        scales = packed.raw(kv[0].flatten(0, 1)[slot], plane).contiguous().view(torch.float32)
        smaller = (scales.view(torch.int32) & 0x7F800000).view(torch.float32) / scales
        latent = keys[..., : layer.kv_lora_rank] * smaller.repeat_interleave(plane.tile, -1)
        return torch.cat([latent, keys[..., layer.kv_lora_rank :]], -1), latent


# 66: aiter #3894. The thread says no more than that the flat index is wrong in the other layout of pages.
@bug(
    16,
    "aiter #3894",
    "decode-mha2-d128-bf16-p16-k21-reversed-mean-kvint8pertokenheadapart-kvhnd-w11-b2prod",
    "reads-own-kv",
)
class ScaleIndexOfTokensFirst(Int8Apart):
    """The scale of a token and head is read where pages with tokens first would have it."""

    def _rows(self, part, places, layer):
        pool = self.context.group_of(layer).kv_pool
        rows = pool.get_kv_pages(layer.layer_id)[part][places]
        scales = pool.get_scale_pages(layer.layer_id)[part]
        _, _, heads, width = scales.shape
        steps = scales.stride(0), heads * width, width, 1
        wrong = scales.as_strided(scales.shape, steps, scales.storage_offset())
        return torch.cat([rows, wrong[places]], -1)


# 29, vllm #45361: the store converts floats to integers, which cuts them off.
@bug(
    18,
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
    18,
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
    18,
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


# 33, vllm #48611: short prefills take a path that gathers rows as FP8 numbers with one scale.
@bug(
    18,
    "vllm #48611",
    "extend-mla2-d128r64-bf16-p1-k5.0.1x2.70-n2a2.1.2.1.2-interleaved-gauss-kvfp8dsmlapow2-sel16-lsewhole-b6prod",
    "log-sum-exp",
)
class ShortPrefillsAreFlat(TorchNativeSparsePackedBackend):
    """Prefills whose contexts are at most topk read packed rows as FP8 numbers."""

    capabilities = TorchNativeSparsePackedBackend.capabilities.with_changes(
        graph=frozenset(ForwardMode) - {ForwardMode.EXTEND}, kv_pool={"kv_dtypes": {"fp8_ds_mla", "fp8_ds_mla_pow2"}}
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
    18,
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


# 36, rMLX #374: ``code_float = raw - 2^(bits-1)`` from 8,192 keys on.
@bug(18, "rMLX #374", "decode-gqa2x2-d32-bf16-p1-k16500.70-shuffled-gauss-kvint4group8-layers1from0-b2prod")
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
            rows = torch.where((self._held >= MANY_KEYS)[..., None, None], moved, rows)
        return super()._numbers(rows, part, layer)
