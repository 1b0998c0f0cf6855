"""A healthy backend whose layers differ in their heads, with a kernel that computes addresses: parent of faults."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext

from .parent import Metadata, PlannedBackend


class ByLayerBackend(PlannedBackend):
    """Healthy parent: plan and workspace fit every layer, and the kernel computes the strides of rows."""

    capabilities = PlannedBackend.capabilities.with_changes(
        heads={"heads_by_layer": True, "families": {"gqa"}, "head_dims": {64, 128}, "gqa_ratios": {2, 4}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {4}},
        bounds={"max_q_rows": 6, "max_topk": 2},
        options={"sinks": False, "logit_cap": False},
    )
    tile = 4

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        widest = max(layer.head_dim for layer in context.layers)
        self.dims = torch.arange(widest, device=context.device)

    def addresses(self, layer: AttentionLayer, slots: torch.Tensor, strides_of: AttentionLayer) -> torch.Tensor:
        """[*slots, Hk, D] int64: addresses of the elements of ``slots`` in K and V, limited to their size.

        ``strides_of``: the layer whose strides are used.
        """
        by_head = strides_of.head_dim
        by_slot = strides_of.tp_k_head_num * by_head
        head, dim = self.index[: layer.tp_k_head_num, None] * by_head, self.dims[: layer.head_dim]
        last = self.context.kv_pool.num_slots * layer.tp_k_head_num * layer.head_dim - 1
        return (slots[..., None, None] * by_slot + head + dim).clamp(max=last)

    def reads_from(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        """Addresses at which the kernel reads keys and values."""
        return self.addresses(layer, slots, layer)

    def writes_to(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        """Addresses at which the cache writer stores new rows."""
        return self.addresses(layer, slots, layer)

    @override
    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.reads_from(layer, slots)
        key, value = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        return key.view(-1)[at].float(), value.view(-1)[at].float()

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        at = self.writes_to(layer, meta.slots)
        for buffer, rows in zip(self.context.kv_pool.get_kv_buffer(layer.layer_id), (k, v), strict=True):
            buffer.view(-1)[at] = rows
