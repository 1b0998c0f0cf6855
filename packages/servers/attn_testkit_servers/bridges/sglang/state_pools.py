"""SGLang's own request table and pool of states, over the kit's memory, and the configurations of hybrid models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.configs.bailing_hybrid import BailingHybridConfig
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardMode, StateContext, StateLayer

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _OfKit:
    """A configuration whose layers have the kit's ids: a rank of a pipeline has layers from any id on."""

    of_kit: tuple[list[int], list[int]]
    """Ids of the linear layers, and of the softmax layers."""

    @property
    def linear_layer_ids(self) -> list[int]:
        return self.of_kit[0]

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return self.of_kit[1]


class _Qwen3Next(_OfKit, Qwen3NextConfig):  # type: ignore[misc]
    pass


class _KimiLinear(_OfKit, KimiLinearConfig):  # type: ignore[misc]
    pass


class _NemotronH(_OfKit, NemotronHConfig):  # type: ignore[misc]
    def __init__(self, **values: Any) -> None:  # transformers makes a constructor for a class that has none
        super().__init__(**values)

    @property
    def mamba_layer_ids(self) -> list[int]:
        return self.of_kit[0]


class _Bailing(_OfKit, BailingHybridConfig):  # type: ignore[misc]
    def __init__(self, **values: Any) -> None:  # as above
        super().__init__(**values)


def _gdn(state: StateContext, layers: int, softmax: Sequence[int]) -> Any:
    first = state.layers[0]
    return _Qwen3Next(
        num_hidden_layers=layers, linear_conv_kernel_dim=first.conv_width, linear_key_head_dim=first.k_dim,
        linear_value_head_dim=first.v_dim, linear_num_key_heads=first.k_heads, linear_num_value_heads=first.v_heads,
    )  # fmt: skip


def _kda(state: StateContext, layers: int, softmax: Sequence[int]) -> Any:
    first = state.layers[0]
    sizes = {
        "num_heads": first.v_heads, "head_dim": first.v_dim, "short_conv_kernel_size": first.conv_width,
        "kda_layers": [layer.layer_id + 1 for layer in state.layers],
        "full_attn_layers": [each + 1 for each in softmax],
    }  # fmt: skip
    return _KimiLinear(num_hidden_layers=layers, linear_attn_config=sizes)


def _mamba(state: StateContext, layers: int, softmax: Sequence[int]) -> Any:
    first = state.layers[0]
    kinds = ["mamba" if each not in softmax else "attention" for each in range(layers)]
    return _NemotronH(
        layers_block_type=kinds, mamba_num_heads=first.v_heads, mamba_head_dim=first.v_dim,
        n_groups=first.k_heads, ssm_state_size=first.k_dim, mamba_d_conv=first.conv_width,
        mamba_chunk_size=_MAMBA_CHUNK,
    )  # fmt: skip


def _lightning(state: StateContext, layers: int, softmax: Sequence[int]) -> Any:
    first = state.layers[0]
    return _Bailing(
        num_hidden_layers=layers, num_attention_heads=first.v_heads, head_dim=first.v_dim,
        num_linear_key_value_heads=first.v_heads,
    )  # fmt: skip


_MAMBA_CHUNK = 64
"""Rows of a chunk of Mamba2's prefill. Models have 128 or 256; with shorter chunks a prompt has more boundaries."""
_CONFIGS = {"gdn": _gdn, "kda": _kda, "mamba": _mamba, "lightning": _lightning}
"""Kind of the linear layers -> function that makes the configuration of a model with them."""


def config_of(state: StateContext, softmax: Sequence[int], ranks: int) -> Any:
    """Configuration of a model with these layers, whose heads are dealt among ranks. ``softmax``: ids of the others."""
    linear = [layer.layer_id for layer in state.layers]
    state = replace(state, layers=tuple(_of_model(layer, ranks) for layer in state.layers))
    made = _CONFIGS[state.layers[0].kind](state, 1 + max(*softmax, *linear), softmax)
    made.of_kit = (linear, list(softmax))
    made.mamba_ssm_dtype = _NAMES[state.pool.dtype]
    return made


def _of_model(layer: StateLayer, ranks: int) -> StateLayer:
    return replace(layer, tp_k_head_num=layer.k_heads * ranks, tp_q_head_num=layer.v_heads * ranks)


def has_turned_windows(state: StateContext) -> bool:
    """True if SGLang's windows of these layers are [W - 1, C], so that it gets a strided view."""
    return state.layers[0].kind == "kda"


def request_pool(context: BackendContext, state: StateContext, config: Any, topk: int) -> Any:
    """SGLang's request table with its pool of states, as its model runner makes it for a hybrid model.

    The tables and the states are the kit's memory. The scratch of drafts is SGLang's own, and holds NaN.
    """
    params, pool = config.mamba2_cache_params, state.pool
    verifies = ForwardMode.TARGET_VERIFY in context.modes
    rows, columns = context.req_to_token.shape
    size = max(rows - 1, context.max_bs)
    made = HybridReqToTokenPool(
        size=size, mamba_size=pool.num_slots - 1, mamba_spec_state_size=size, max_context_len=columns,
        device=context.device.type, enable_memory_saver=False, cache_params=params,
        mamba_layer_ids=[layer.layer_id for layer in state.layers], enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=context.num_draft_tokens if verifies else None,
        speculative_eagle_topk=topk or None, enable_overlap_schedule=False,
    )  # fmt: skip
    conv, temporal = (
        _of_all_layers([each(layer.layer_id) for layer in state.layers]) for each in (pool.conv, pool.temporal)
    )
    held = made.mamba_pool.mamba_cache
    conv = conv.mT if has_turned_windows(state) else conv
    if not conv.numel():
        conv = held.conv[0]  # no convolution, and two shapes of nothing
    for own, ours in ((held.conv[0], conv), (held.temporal, temporal)):
        if (own.shape, own.dtype) != (ours.shape, ours.dtype):
            raise RuntimeError(
                f"SGLang's pool of states is {own.dtype} {tuple(own.shape)}, the kit's {ours.dtype} "
                f"{tuple(ours.shape)}: the configuration in state_pools.py does not match the case"
            )
    scratch = {}
    if verifies:
        scratch = {"intermediate_ssm": held.intermediate_ssm, "intermediate_conv_window": held.intermediate_conv_window}
        for part in (held.intermediate_ssm, *made.mamba_pool._intermediate_conv_window_phys):
            part.fill_(torch.nan)
    made.mamba_pool.mamba_cache = type(held)(conv=[conv], temporal=temporal, **scratch)
    made.req_to_token = context.req_to_token
    made.req_index_to_mamba_index_mapping = state.req_to_state
    return made


def kv_pool(context: BackendContext, softmax: Sequence[AttentionLayer], states: Any) -> Any:
    """SGLang's KV pool of the softmax layers of a hybrid model, over the kit's memory if the kit has the layer."""
    ours, first = context.kv_pool, softmax[0]
    made = HybridLinearKVPool(
        size=ours.num_slots - context.page_size, dtype=ours.dtype, page_size=context.page_size,
        head_num=first.tp_k_head_num, head_dim=first.head_dim, device=context.device.type, mamba_pool=states,
        full_attention_layer_ids=[layer.layer_id for layer in softmax], start_layer=softmax[0].layer_id,
    )  # fmt: skip
    full = made.full_kv_pool
    for place, layer in enumerate(softmax):
        if layer.layer_id in ours.memory:
            keys, values = ours.get_kv_buffer(layer.layer_id)
            if full.k_buffer[place].shape != keys.shape or full.v_buffer[place].shape != values.shape:
                raise RuntimeError(
                    f"SGLang's KV pool has {tuple(full.k_buffer[place].shape)}, the kit's {tuple(keys.shape)}"
                )
            full.k_buffer[place], full.v_buffer[place] = keys, values
    return made


def _of_all_layers(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[L, slots, ...] of the views [slots, ...] of each layer, which have the same distance; a view."""
    first, places = parts[0], [part.storage_offset() for part in parts]
    step = places[1] - places[0] if len(places) > 1 else 0
    if places != [places[0] + index * step for index in range(len(parts))]:
        raise RuntimeError(
            "layers of the kit's pool of states have unequal distances; SGLang has all layers in one tensor"
        )
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()), places[0])


def softmax_of(context: BackendContext) -> list[AttentionLayer]:
    """The softmax layers of a model; without any, one that follows all layers of the kit."""
    found = [layer for layer in context.layers if not isinstance(layer, StateLayer)]
    last = context.layers[-1].layer_id + 1
    return found or [AttentionLayer(last, tp_q_head_num=2, tp_k_head_num=1, head_dim=64, v_head_dim=64, scaling=0.125)]
