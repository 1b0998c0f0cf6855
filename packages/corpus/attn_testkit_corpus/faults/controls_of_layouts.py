"""Healthy controls of KV layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_testkit.contract import AttentionLayer, KVLayer, KVPoolSpec

from .catalogue import control
from .parent import PlannedBackend
from .strided import LEAN, StridedBackend, Views


@control()
class StridesOfEveryLayout(StridedBackend):
    """Kernel and cache writer support any strides of pages, slots and heads."""


@control()
class PoolCopiedInsideTheGraph(StridedBackend):
    """A pool of heads first is made contiguous for a kernel of the other layout, at every step, which is slow but
    right."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"hnd", "side-by-side-hnd"}})

    def read_views(self, layer: AttentionLayer) -> Views:
        key, value = super().read_views(layer)
        return key.contiguous(), value.contiguous()


@control()
class KeysInPiecesOfEight(PlannedBackend):
    """A custom pool: keys in pieces of 8, values with slots last, unused memory after each layer (vLLM's first)."""

    capabilities = LEAN.with_changes(kv_pool={"kv_layouts": {"custom"}})

    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        layers = []
        for layer in spec.layers:
            heads, dim = layer.tp_k_head_num, layer.head_dim
            sizes = {"dtype": spec.dtype, "device": spec.device}
            key = torch.zeros(spec.pages + 1, heads, dim // 8, spec.page_size, 8, **sizes)[:-1]  # type: ignore[call-overload]
            value = torch.zeros(spec.pages, heads, dim, spec.page_size, **sizes)  # type: ignore[call-overload]
            layers.append(KVLayer(key.permute(0, 3, 1, 2, 4), value.permute(0, 3, 1, 2)))
        return layers

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory, page = self.context.kv_pool.memory[layer.layer_id], self.context.page_size
        at, fp8 = (slots // page, slots % page), self.context.kv_pool.dtype.itemsize == 1
        found = []
        for view in memory.parts:
            raw = (view.view(torch.uint8) if fp8 else view)[at]
            found.append((raw.view(view.dtype) if fp8 else raw).float().flatten(3))
        return found[0], found[1].reshape(found[0].shape)
