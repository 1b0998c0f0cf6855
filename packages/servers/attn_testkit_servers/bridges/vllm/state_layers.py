"""vLLM's layers of each kind of recurrent state, without the projections around them: these return their input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.vllm import set_current_vllm_config
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen
from vllm.model_executor.layers.mamba.linear import bailing_linear_attn as bailing
from vllm.model_executor.layers.mamba.linear import minimax_linear_attn as minimax
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, mamba_mixer2

from attn_testkit.contract import StateContext, StateLayer

from .config import one_rank
from .layers import name_of

MAMBA_CHUNK = 64
"""Rows of a chunk of Mamba2's prefill. Models have 128 or 256; with shorter chunks a prompt has more boundaries."""

Given = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""``mixed``, ``a`` and ``b`` of the kit, which must not be modified."""


def _bare(kind: Any, config: Any, layer: StateLayer, values: Mapping[str, Any]) -> Any:
    """An object of a vLLM class, made without its constructor, which would need weights to load."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    common = {
        "prefix": name_of(layer), "tp_size": 1, "tp_rank": 0, "layer_idx": layer.layer_id,
        "model_config": config.model_config, "cache_config": config.cache_config, "vllm_config": config,
        "speculative_config": config.speculative_config, "num_spec": config.num_speculative_tokens,
        "activation": None if layer.activation == "none" else layer.activation,
    }  # fmt: skip
    for name, value in {**common, **values}.items():
        setattr(made, name, value)
    return made


def _conv1d(layer: StateLayer) -> Any:
    assert layer.conv_weight is not None
    return SimpleNamespace(weight=layer.conv_weight[:, None], bias=layer.conv_bias)


def _handed_on(rows: torch.Tensor) -> tuple[torch.Tensor, None]:
    return rows, None


def _gdn(config: Any, layer: StateLayer) -> Any:
    keys, values = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim
    rule = qwen.ChunkGatedDeltaRule()
    return _bare(qwen.QwenGatedDeltaNetAttention, config, layer, {
        "num_k_heads": layer.k_heads, "num_v_heads": layer.v_heads, "head_k_dim": layer.k_dim,
        "head_v_dim": layer.v_dim, "conv_kernel_size": layer.conv_width, "key_dim": keys, "value_dim": values,
        "conv_dim": 2 * keys + values, "conv1d": _conv1d(layer), "A_log": layer.A_log, "dt_bias": layer.dt_bias,
        "gqa_interleaved_layout": False, "chunk_gated_delta_rule": rule,
        "gdn_prefill_backend": rule.gdn_prefill_backend, "_checkpoint_alignment": None,
        "enable_packed_recurrent_decode": qwen.envs.VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE,
        # The case of a vLLM without its CUDA kernel, which does the norm behind the layer too.
        "gdn_decode_kernel": "triton", "enable_fused_gdn_spec_decode": False,
    })  # fmt: skip


def _give_gdn(made: Any, given: Given, layer: StateLayer) -> torch.Tensor:
    """Split a projection and call the core, as ``forward_cuda`` does. A row is mixed and the gate of the norm."""
    mixed, a, b = given
    assert a is not None
    assert b is not None
    rows = torch.cat([mixed, mixed.new_zeros(len(mixed), made.value_dim)], -1)
    out = mixed.new_zeros(len(mixed), layer.v_heads, layer.v_dim)
    mixed, _ = torch.split(rows, [made.conv_dim, made.value_dim], -1)
    qwen.qwen_gdn_attention_core(mixed, b.contiguous(), a.contiguous(), out, layer_name=made.prefix)
    return out


def _mamba(config: Any, layer: StateLayer) -> Any:
    keys, values = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim
    conv = _conv1d(layer)
    assert layer.A_log is not None

    def split(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(rows, [values, keys, keys], -1)

    return _bare(MambaMixer2, config, layer, {
        "num_heads": layer.v_heads, "head_dim": layer.v_dim, "ssm_state_size": layer.k_dim, "n_groups": layer.k_heads,
        "intermediate_size": values, "groups_ssm_state_size": keys, "conv_dim": values + 2 * keys,
        "conv_kernel_size": layer.conv_width, "conv1d": conv, "conv_weights": conv.weight[:, 0],
        "A": -layer.A_log.exp(), "D": layer.D, "dt_bias": layer.dt_bias, "use_replayssm": False,
        "mamba_config": config.mamba_config, "is_blackwell": False, "tped_intermediate_size": values,
        "tped_conv_size": values + 2 * keys, "tped_dt_size": layer.v_heads, "split_hidden_states_B_C_fn": split,
    })  # fmt: skip


def _give_mamba(made: Any, given: Given, layer: StateLayer) -> torch.Tensor:
    """Call the core, as ``MambaMixer2.forward`` does. A row is gate, mixed and dt."""
    mixed, dt, _ = given
    assert dt is not None
    rows = torch.cat([mixed.new_zeros(len(mixed), made.intermediate_size), mixed, dt], -1)
    out = mixed.new_empty(len(mixed), made.intermediate_size)
    mamba_mixer2(rows, out, made.prefix)
    return out


def _linear(kind: Any, config: Any, layer: StateLayer, values: Mapping[str, Any]) -> Any:
    width = layer.v_heads * layer.v_dim
    assert layer.slope is not None
    return _bare(kind, config, layer, {
        "num_heads": layer.v_heads, "head_dim": layer.v_dim, "tp_heads": layer.v_heads, "hidden_inner_size": width,
        "BLOCK": 256, "tp_slope": layer.slope.view(-1, 1, 1), **values,
    })  # fmt: skip


def _bailing(config: Any, layer: StateLayer) -> Any:
    width = layer.v_heads * layer.v_dim

    def ungated(hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return hidden

    return _linear(bailing.BailingMoELinearAttention, config, layer, {
        "tp_kv_heads": layer.v_heads, "q_size_per_rank": width, "kv_size_per_rank": width, "use_qk_norm": False,
        "linear_silu": False, "linear_rope": False, "linear_scale": False, "query_key_value": _handed_on,
        "g_proj": _handed_on, "group_norm_size": 2, "g_norm": ungated, "dense": _handed_on,
    })  # fmt: skip


def _give_bailing(made: Any, given: Given, layer: StateLayer) -> torch.Tensor:
    """Call the layer, as the operator ``linear_attention`` does."""
    mixed = given[0]
    out = mixed.new_empty(len(mixed), made.hidden_inner_size)
    minimax.linear_attention(mixed, out, _no_positions(mixed), made.prefix)
    return out


def _minimax(config: Any, layer: StateLayer) -> Any:
    return _linear(minimax.MiniMaxText01LinearAttention, config, layer, {})


def _give_minimax(made: Any, given: Given, layer: StateLayer) -> torch.Tensor:
    """Do the part of ``_forward`` between activation and norm: q, k and v of the kit have none."""
    metadata = minimax.get_forward_context().attn_metadata[made.prefix]
    rows = metadata.num_prefill_tokens + metadata.num_decode_tokens
    q, k, v = (each.view(rows, layer.v_heads, -1) for each in given[0][:rows].float().chunk(3, -1))
    cache, slots = made.kv_cache[0], metadata.state_indices_tensor
    minimax.clear_linear_attention_cache_for_new_sequences(cache, slots, metadata)
    run = made._prefill_and_mix_infer if metadata.num_prefills else made._decode_infer
    out = given[0].new_empty(len(given[0]), made.hidden_inner_size)
    out[:rows] = run(q, k, v, cache, slots, metadata)
    return out


def _no_positions(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Kind:
    """A class of vLLM's layers, and how it is called."""

    make: Callable[[Any, StateLayer], Any]
    """Called with the configuration and the kit's layer."""
    forward: Callable[[Any, Given, StateLayer], torch.Tensor]
    """Called with vLLM's layer, (mixed, a, b) and the kit's layer, within a forward context."""


KINDS: Mapping[str, Kind] = {
    "QwenGatedDeltaNetAttention": Kind(_gdn, _give_gdn),
    "MambaMixer2": Kind(_mamba, _give_mamba),
    "BailingMoELinearAttention": Kind(_bailing, _give_bailing),
    "MiniMaxText01LinearAttention": Kind(_minimax, _give_minimax),
}
"""``BridgeCapabilities.state_layer`` -> layer."""


def make_state_layers(kind: str, config: Any, state: StateContext) -> dict[str, Any]:
    """Name -> layer, each bound to the kit's states; ``config`` knows them afterwards."""
    one_rank()
    found: dict[str, Any] = {}
    with set_current_vllm_config(config):
        for layer in state.layers:
            made = KINDS[kind].make(config, layer)
            conv, temporal = state.pool.conv(layer.layer_id), state.pool.temporal(layer.layer_id)
            made.kv_cache = (conv, temporal) if layer.conv_width > 1 else (temporal,)
            for ours, shape, dtype in zip(made.kv_cache, made.get_state_shape(), made.get_state_dtype(), strict=True):
                if (tuple(ours.shape[1:]), ours.dtype) != (tuple(shape), dtype):
                    raise RuntimeError(
                        f"vLLM's states are {dtype} {tuple(shape)}, the kit's {ours.dtype} {tuple(ours.shape[1:])}: "
                        "the configuration in states.py does not match the case"
                    )
            config.compilation_config.static_forward_context[made.prefix] = made
            found[made.prefix] = made
    return found
