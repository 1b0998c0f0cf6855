"""A healthy backend that finds K and V by the strides of the KV pool, which faults of layouts override."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import KV_LAYOUTS, AttentionLayer

from .parent import Metadata, PlannedBackend
from .pool_reads import read_at

LEAN = PlannedBackend.capabilities.with_changes(
    heads={"families": {"gqa"}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
    options={"logit_cap": False, "sinks": False},
)
Views = tuple[torch.Tensor, torch.Tensor]
"""K and V [pages, page_size, Hk, D], of any strides."""


class StridedBackend(PlannedBackend):
    """Healthy parent: kernel and cache writer get the strides of pages, slots and heads."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": set(KV_LAYOUTS) - {"custom"}})

    def read_views(self, layer: AttentionLayer) -> Views:
        """Views that the kernel reads."""
        return self.context.kv_pool.get_kv_pages(layer.layer_id)

    def write_views(self, layer: AttentionLayer) -> Views:
        """Views that the cache writer writes to."""
        return self.context.kv_pool.get_kv_pages(layer.layer_id)

    def at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page of each slot, and place in the page, int64."""
        return slots // self.context.page_size, slots % self.context.page_size

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.read_views(layer)
        return read_at(key, self.at(slots)), read_at(value, self.at(slots))

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        scales, at = (layer.k_scale, layer.v_scale), self.at(meta.slots)
        for view, rows, scale in zip(self.write_views(layer), (k, v), scales, strict=True):
            if view.dtype.itemsize > 1:
                view[at] = rows.to(view.dtype)
            else:
                most = torch.finfo(view.dtype).max
                stored = (rows.float() / scale).clamp(-most, most).to(view.dtype)
                view.view(torch.uint8)[at] = stored.view(torch.uint8)
