"""KV cache groups, and the metadata builders of each: vLLM's own planning, over the kit's layers and block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.vllm import set_current_vllm_config
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend

from attn_testkit.contract import BackendContext, KVGroup, StateLayer

from .layers import name_of


@dataclass(frozen=True, eq=False)
class Groups:
    """KV cache groups that vLLM made from the layers."""

    config: Any
    """``KVCacheConfig``, with the layers that share a block table."""
    builders: Any
    """``list[list[AttentionGroup]]``: KV cache group -> layers that share metadata, and their builder."""
    of_kit: tuple[KVGroup, ...]
    """KV cache group -> the kit's KV group, whose table and slots it has."""


def make_groups(config: Any, context: BackendContext, layers: dict[str, Any], blocks: int) -> Groups:
    """Group the layers as the engine does, and make builders as the model runner does.

    Layers with their own block table in the kit also have one in vLLM, where many layers of one kind are several
    groups. Layers with a state have groups of their own.
    """
    found: list[tuple[Any, KVGroup]] = []
    with set_current_vllm_config(config):
        for group in context.groups:
            held = [layer for layer in context.layers if layer.layer_id in group.layer_ids]
            for states in (False, True):
                names = [name_of(layer) for layer in held if isinstance(layer, StateLayer) is states]
                specs = {name: layers[name].get_kv_cache_spec(config) for name in names}
                found.extend((planned, group) for planned in get_kv_cache_groups(config, specs))
        whole = KVCacheConfig(blocks, [], [planned for planned, _ in found])
        builders, _, _ = init_attn_backend(whole, config, context.device)
    return Groups(whole, builders, tuple(group for _, group in found))
