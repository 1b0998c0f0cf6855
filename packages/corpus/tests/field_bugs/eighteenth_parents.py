"""Healthy backends that bugs of the eighteenth set are put into, in the parts that kernels have."""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.contract.row_format import HALVES, POWER_OF_TWO, codes_of, in_tiles


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


class ReadsByOffset(TorchNativeBackend):
    """Finds rows of keys that are wider than values by their offsets in memory."""

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

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
