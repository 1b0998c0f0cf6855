"""vLLM's own views of KV cache memory: the kit knows only the places of each layer's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)

from attn_testkit.contract import AttentionLayer, KVLayer, KVPoolSpec


def layout_of(real: Any, wanted: str = "") -> Any:
    """The ``KVCacheLayout`` for the backend class ``real``: the ``wanted`` one, or else the one that it prefers."""
    supported = get_supported_kv_cache_layouts([real])
    return next(each for each in supported if each.name == (wanted or supported[0].name))


def lay_out(real: Any, spec: KVPoolSpec, wanted: str = "") -> Sequence[KVLayer]:
    """Memory for a server with the backend class ``real``: [blocks, heads, block size, content] per layer. ``wanted``:
    as in ``layout_of``."""
    layout = layout_of(real, wanted)
    found: dict[int, KVLayer] = {}
    for shape in dict.fromkeys(layer.head_shape for layer in spec.layers):
        alike = [layer for layer in spec.layers if layer.head_shape == shape]
        of_vllm = _spec(real, alike[0], spec)
        # Byte strides of [layer, block, head, slot, content].
        strides = compute_layout_strides(of_vllm, spec.pages, len(alike), layout)
        size = of_vllm.page_size_bytes * spec.pages * len(alike)
        memory = torch.zeros(size, dtype=torch.int8, device=spec.device)
        assert compute_layer_kv_cache_shape_bytes(of_vllm, spec.pages)[0] == spec.pages
        where = KVCacheTensor(size, [_name(layer) for layer in alike], strides[0], strides[1])
        views = create_kv_cache_views(memory, of_vllm, spec.pages, layout, where)
        found.update({layer.layer_id: _rows(layer, view) for layer, view in zip(alike, views, strict=True)})
    return [found[layer.layer_id] for layer in spec.layers]


def _name(layer: AttentionLayer) -> str:
    return f"layers.{layer.layer_id}"


def _spec(real: Any, layer: AttentionLayer, spec: KVPoolSpec) -> Any:
    kind = MLAAttentionSpec if layer.is_mla else FullAttentionSpec
    mode = get_kv_quant_mode(spec.row_format.name) if spec.row_format else KVQuantMode.NONE
    made = kind(
        block_size=spec.page_size, num_kv_heads=layer.tp_k_head_num, head_size=layer.head_dim, dtype=spec.dtype,
        kv_quant_mode=mode,
    )  # fmt: skip
    return real.customize_spec(made) if spec.row_format else made


def _rows(layer: AttentionLayer, cache: torch.Tensor) -> KVLayer:
    """``cache`` [blocks, heads, block size, content]: K and V of a slot side by side, or MLA's latent row."""
    by_slot = cache.transpose(1, 2)
    if layer.is_mla:
        return KVLayer(by_slot, buffer=cache)
    key, value = by_slot.chunk(2, dim=-1)
    return KVLayer(key, value, buffer=cache)
