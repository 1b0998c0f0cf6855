"""Rows of formats with scales; bugs of the fourteenth set."""

from __future__ import annotations

import torch
from plain_backends import Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug, helper

FP4_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


@bug(
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


@bug("kvcached #435", "decode-gqa2x2-d128-bf16-p16-k0.1.16-shuffled-gauss-kvfp8pertokenhead-b4nan", "writes-own-kv")
class ScalesOfFirstLayer(WritesScalesElsewhere):
    """Views of scales have no offset of their layer: all layers have those of the first."""

    def scale_planes(self, layer):
        return super().scale_planes(self.context.layers[0])


@bug("vllm #51091", "decode-gqa2x2-d128-bf16-p16-k0.1.16-shuffled-gauss-kvfp8pertokenhead-b4nan", "writes-own-kv")
class ScalesSetAtFirstTouch(PackedKV):
    """The last layer sets the scales of the pool that it takes for its own, the first layer's, in its first forward."""

    touched = False

    def run(self, q, kv, plan):
        if plan.layer.layer_id == self.context.layers[-1].layer_id and not self.touched:
            self.touched = True
            for plane in self.scale_planes(self.context.layers[0]):
                plane.fill_(1.0)
        return super().run(q, kv, plan)


@bug("vllm #50085", "decode-gqa2x2-d64-bf16-p16-k15.16.17-interleaved-rising_logits-kvnvfp4-b3prod", "writes-own-kv")
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


@bug("vllm #53681", "decode-gqa2x2-d64-bf16-p16-k0.1.16-contiguous-rising_logits-kvnvfp4-kvhnd-b3prod", "completes")
class HeadsAsPageSize(PackedKV):
    """The writer of a pool with heads first takes the number of heads for the size of a page."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"nvfp4"}, "kv_layouts": {"hnd"}})

    def write_kv(self, k, v, plan):
        layer, slots, heads = plan.layer, plan.out_cache_loc.long(), plan.layer.tp_k_head_num
        if heads % 4:
            raise RuntimeError("block_size must be divisible by 4")
        pool = self.pool_of(layer)
        packed = pool.rows_of(layer)
        sides = [(k, layer.k_scale), (v, layer.v_scale)]
        views = zip(sides, pool.get_kv_pages(layer.layer_id), pool.get_scale_pages(layer.layer_id), strict=True)
        for (rows, scale), numbers, scales in views:
            raw = packed.pack(packed.divided(rows.reshape(len(rows), heads, -1), scale, None))
            inside = numbers.shape[-1]
            for view, part in ((numbers, raw[..., :inside]), (scales, raw[..., inside:])):
                view = view.transpose(1, 2)
                page, head = (slots // heads) % len(view), torch.arange(heads, device=slots.device)
                view[page[:, None], (slots % heads)[:, None], head % view.shape[2]] = part


@bug("sgl-kernel-xpu #252", "decode-gqa2x2-d64-bf16-p16-k15.16.17-interleaved-rising_logits-kvfp8perhead-b3prod")
class FirstScaleOfAll(PackedKV):
    """The scale of the first head is that of each head."""

    capabilities = PackedKV.capabilities.with_changes(kv_pool={"kv_dtypes": {"fp8_per_head"}})

    def head_scales(self, layer):
        return tuple(scales[:1].expand_as(scales) for scales in super().head_scales(layer))


@bug("lmdeploy #4850", "decode-gqa2x2-d96-bf16-p16-k0.1.16-shared-mean-kvint8pertokenhead-b3prod", "writes-own-kv")
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
