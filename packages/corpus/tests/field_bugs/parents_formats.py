"""Healthy backends over rows of formats."""

from __future__ import annotations

import torch
from parents_mode import KnowsMode
from plain_backends import Tiled, declared

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparsePackedBackend
from attn_testkit.contract.row_format import HALVES, POWER_OF_TWO, codes_of, in_tiles

FP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Packs(TorchNativeFormatsBackend):
    """Packs the rows that it stores itself: scales, divided numbers, and their bytes."""

    def _store(self, k, v, layer, batch, save_kv_cache):
        if not self._is_packed or not save_kv_cache or layer.is_cross_attention:
            return super()._store(k, v, layer, batch, save_kv_cache)
        group = self.context.group_of(layer)
        pool, slots = group.kv_pool, group.cache_loc(batch).clamp(min=0).long()
        at = slots // self.context.page_size, slots % self.context.page_size
        form, apart = pool.rows_of(layer), pool.get_scale_pages(layer.layer_id)
        given = (k, layer.k_scale, layer.k_head_scales), (v, layer.v_scale, layer.v_head_scales)
        for part, (rows, scale, by_head) in enumerate(given):
            keys = form.divided(rows.reshape(-1, layer.tp_k_head_num, layer.head_dim), scale, by_head)
            rows = self.packed(form, keys)
            inside = form.nbytes - form.nbytes_apart
            pool.get_kv_pages(layer.layer_id)[part].index_put_(at, rows[..., :inside])
            if apart:
                apart[part].index_put_(at, rows[..., inside:])
        return None

    def packed(self, form, keys):
        """[..., bytes] uint8 of ``keys`` [..., width]."""
        found = []
        for plane in form.format.planes:
            numbers, scales = keys[..., form.part(plane)].float(), form.scales_of(plane)
            if plane.is_scales:
                numbers = self.scales(form, plane, keys)
            elif scales is not None:
                numbers = (in_tiles(numbers, scales.tile) / self.divisors(form, scales, keys)[..., None]).flatten(-2)
            found.append(self.bytes_of(numbers, plane.dtype))
        return torch.cat(found, -1)

    def scales(self, form, plane, keys):
        """Scales as they are stored."""
        return form.scales(plane, keys)

    def divisors(self, form, plane, keys):
        """Scales that numbers are divided by."""
        return self.scales(form, plane, keys)

    def codes(self, numbers, dtype):
        return codes_of(numbers, dtype)

    def bytes_of(self, numbers, dtype):
        if dtype == POWER_OF_TWO:
            return (numbers.float().view(torch.int32) >> 23).to(torch.uint8)
        if dtype in HALVES:
            codes = self.codes(numbers, dtype)
            return codes[..., 0::2] + codes[..., 1::2] * 16
        if dtype.itemsize == 1:
            return self.codes(numbers, dtype).contiguous()
        return numbers.to(dtype).contiguous().view(torch.uint8)


class ReadsByOffset(KnowsMode, TorchNativeBackend):
    """Finds rows of keys that are wider than values by their offsets in memory."""

    def is_wider(self, layer):
        return layer.head_dim != layer.v_head_dim and not layer.kv_lora_rank

    def widths(self, layer):
        """Elements from one head to the next one, of K and of V."""
        return layer.head_dim, layer.v_head_dim

    def _keys(self, layer):
        if not self.is_wider(layer):
            return super()._keys(layer)
        return self.by_offset(0, self._keys_at[self._keys_of(layer)][0], layer)

    def _values(self, layer, seen):
        if not self.is_wider(layer):
            return super()._values(layer, seen)
        return self.by_offset(1, seen.values[0], layer)

    def by_offset(self, part, slots, layer):
        side = self._buffers(layer)[part]
        heads, width, step = side.shape[1], side.shape[2], self.widths(layer)[part]
        head = torch.arange(heads, device=side.device)[:, None] * step
        at = (slots * heads * step)[..., None, None] + head + torch.arange(width, device=side.device)
        flat = side.flatten()
        if flat.dtype.itemsize == 1:
            rows = flat.view(torch.uint8)[at % len(flat)].view(flat.dtype)
        else:
            rows = flat[at % len(flat)]
        return rows.float().transpose(1, 2).contiguous()


class PackedKV(Tiled):
    """A right backend over rows that hold their scales, which it splits by views of planes."""

    capabilities = declared(
        "decode",
        "extend",
        heads={"gqa_ratios": {1, 2, 4}, "head_dims": {64, 128}},
        kv_pool={
            "page_sizes": {16, 64},
            "kv_dtypes": {"int8_per_token_head", "fp8_per_token_head"},
            "kv_layouts": {"nhd", "padded-pages"},
        },
    )

    def __init__(self, context):
        super().__init__(context)
        sizes = torch.tensor(FP4_SIZES, device=context.device)
        self.fp4 = torch.cat([sizes, -sizes])

    def pool_of(self, layer):
        return self.context.group_of(layer).kv_pool

    def scale_planes(self, layer):
        """Views of the scales of K and V, [pages, page_size, Hk, scales] each; none of formats without any."""
        return tuple(side.get("scales") for side in self.pool_of(layer).get_planes(layer.layer_id))

    def keys(self, kv, slots, plan):
        layer, size = plan.layer, plan.page_size
        page, place = slots // size, slots % size
        planes, scales = self.pool_of(layer).get_planes(layer.layer_id), self.scale_planes(layer)
        by_head = self.head_scales(layer)
        return tuple(
            self.meant(side["numbers"], scale, own, page, place)
            for side, scale, own in zip(planes, scales, by_head, strict=True)
        )

    def head_scales(self, layer):
        return layer.k_head_scales, layer.v_head_scales

    def meant(self, numbers, scales, by_head, page, place):
        held = self.at(numbers, page, place)
        if numbers.dtype == torch.uint8:
            held = self.fp4[torch.stack((held.long() & 15, held.long() >> 4), -1).flatten(-2)]
        held = held.float()
        if scales is not None:
            each = self.at(scales, page, place).float()
            held = held * each.repeat_interleave(held.shape[-1] // each.shape[-1], -1)
        return held if by_head is None else held * by_head[:, None]

    def at(self, plane, page, place):
        """Not every device can gather FP8."""
        if plane.dtype.itemsize > 1:
            return plane[page, place]
        return plane.view(torch.uint8)[page, place].view(plane.dtype)

    def new_scales(self, layer, k, v):
        """Scales of new rows as the format has them, [T, Hk, scales] each."""
        packed = self.pool_of(layer).rows_of(layer)
        plane = packed.scale_planes[0]
        given = ((k, layer.k_scale), (v, layer.v_scale))
        return [
            packed.scales(plane, packed.divided(rows.reshape(len(rows), layer.tp_k_head_num, -1), scale, None))
            for rows, scale in given
        ]

    def put(self, plane, page, place, scales):
        if plane.dtype.itemsize > 1:
            plane[page, place] = scales.to(plane.dtype)
        else:
            plane.view(torch.uint8)[page, place] = scales.to(plane.dtype).view(torch.uint8)


class WritesScalesElsewhere(PackedKV):
    """Numbers are stored where they belong; ``scale_planes`` says where scales are stored and read."""

    def write_kv(self, k, v, plan):
        layer, slots = plan.layer, plan.out_cache_loc.long()
        page, place = slots // plan.page_size, slots % plan.page_size
        right = PackedKV.scale_planes(self, layer)
        before = [self.at(plane, page, place).clone() for plane in right]
        super().write_kv(k, v, plan)
        for plane, held in zip(right, before, strict=True):
            self.put(plane, page, place, held)
        for plane, new in zip(self.scale_planes(layer), self.new_scales(layer, k, v), strict=True):
            self.put(plane, page, place, new)


class StoresRows(TorchNativeFormatsBackend):
    """Stores rows itself, by page and slot, in the layout with tokens first."""

    def _store(self, k, v, layer, batch, save_kv_cache):
        if not save_kv_cache:
            return
        group = self.context.group_of(layer)
        self.put(group.kv_pool, (k, v), layer, group.cache_loc(batch).clamp(min=0).long(), batch)

    def put(self, pool, given, layer, slots, batch):
        """Store rows of K and V [T, Hk, D] in ``slots`` [T]."""
        packed = self.packed_of(layer, batch)
        scales = (layer.k_scale, layer.k_head_scales), (layer.v_scale, layer.v_head_scales)
        for part, rows in enumerate(given):
            rows = rows.reshape(-1, layer.tp_k_head_num, layer.head_dim)
            rows = packed.pack(packed.divided(rows, *scales[part]))
            inside = packed.nbytes - packed.nbytes_apart
            self.put_numbers(pool, part, rows[..., :inside], layer, slots)
            if packed.nbytes_apart:
                self.put_scales(pool, part, rows[..., inside:], layer, slots)

    def packed_of(self, layer, batch):
        return self.context.kv_pool.rows_of(layer)

    def places(self, slots):
        return slots // self.context.page_size, slots % self.context.page_size

    def put_numbers(self, pool, part, rows, layer, slots):
        pool.get_kv_pages(layer.layer_id)[part].index_put_(self.places(slots), rows)

    def put_scales(self, pool, part, rows, layer, slots):
        pool.get_scale_pages(layer.layer_id)[part].index_put_(self.places(slots), rows)


def of_format(*names, layouts=("nhd",), **changes):
    return TorchNativeFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": set(names), "kv_layouts": set(layouts), "kv_groups": False, "page_sizes": {16, 64}},
        cross_attention={"modes": frozenset()},
        lse=None,
        **changes,
    )


class Nvfp4(StoresRows):
    """NVFP4 with scales apart."""

    capabilities = of_format("nvfp4")


class Fp8PerTokenHead(StoresRows):
    """FP8 with a scale for each token and head behind its row."""

    capabilities = of_format("fp8_per_token_head")


class Int8PerTokenHead(StoresRows):
    """Integers of 8 bits with a scale for each token and head behind their row."""

    capabilities = of_format("int8_per_token_head")


class Fp8PerHead(StoresRows):
    """FP8 with scales of heads."""

    capabilities = of_format("fp8_per_head")


class Int8Apart(StoresRows):
    """Integers of 8 bits with scales apart, pages with heads first."""

    capabilities = of_format("int8_per_token_head_apart", layouts=("hnd",))


class Fp8(TorchNativeBackend):
    """FP8 with a scale for each layer."""

    capabilities = TorchNativeBackend.capabilities.with_changes(
        heads={
            "families": {"mha", "gqa", "mqa"},
            "mla_rope_dims": set(),
            "gqa_ratios": {1, 2, 4, 8, 16},
            "head_dims": {64, 128},
            "heads_by_layer": False,
            "wider_keys": set(),
        },
        kv_pool={"kv_dtypes": {"fp8_e4m3"}, "kv_layouts": {"nhd"}, "kv_groups": False, "page_sizes": {16, 64, 128}},
        precision={"dtypes": {"bf16", "fp16"}},
        cross_attention={"modes": frozenset()},
        lse=None,
        options={"sinks": False},
    )


class PackedMla(TorchNativeSparsePackedBackend):
    """Packed rows of MLA with float32 scales that are not powers of two."""

    capabilities = TorchNativeSparsePackedBackend.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_ds_mla"}})
