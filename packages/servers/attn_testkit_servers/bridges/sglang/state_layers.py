"""SGLang's layers of each kind of recurrent state, and how its models call the wrapper with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.mamba import causal_conv1d_triton
from sglang.kernels.ops.mamba.triton_ops.ssu_dispatch import initialize_mamba_selective_state_update_backend
from sglang.srt.layers.attention.mamba import mamba as mixers
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor import forward_batch_info as fbi
from sglang.srt.runtime_context import get_context

from attn_testkit.contract import StateLayer


def _radix(layer: StateLayer) -> Any:
    return RadixLinearAttention(
        layer.layer_id, layer.k_heads, layer.k_heads, layer.v_heads, layer.k_dim, layer.k_dim, layer.v_dim,
        conv_weights=layer.conv_weight, bias=layer.conv_bias,
        activation=None if layer.activation == "none" else layer.activation,
        A_log=layer.A_log, dt_bias=layer.dt_bias, lower_bound=layer.lower_bound,
    )  # fmt: skip


def _give_gdn(real: Any, made: Any, given: tuple[Any, Any, Any], layer: StateLayer, batch: Any) -> torch.Tensor:
    """Pass three tensors on, as ``RadixLinearAttention.forward`` does."""
    mixed, a, b = given
    out: torch.Tensor = real.forward(layer=made, forward_batch=batch, mixed_qkv=mixed, a=a, b=b)
    return out


def _give_kda(real: Any, made: Any, given: tuple[Any, Any, Any], layer: StateLayer, batch: Any) -> torch.Tensor:
    """Gates as ``models/kimi_linear.py`` gives them."""
    mixed, a, b = given
    if batch.forward_mode is fbi.ForwardMode.EXTEND:
        a = a.unflatten(-1, (-1, layer.k_dim))[None]
    return _give_gdn(real, made, (mixed, a, b[None]), layer, batch)


def _mixer(layer: StateLayer) -> Any:
    """The mixer of a Mamba2 layer without its projections and its norm: these return their input."""
    # The module imports its Triton convolution on a GPU only.
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        vars(mixers).setdefault(f"{name}_triton", getattr(causal_conv1d_triton, name))
    initialize_mamba_selective_state_update_backend(get_context().server_args)  # as its scheduler does
    made = mixers.MambaMixer2.__new__(mixers.MambaMixer2)
    torch.nn.Module.__init__(made)
    assert layer.conv_weight is not None
    assert layer.A_log is not None
    values, keys = layer.v_heads * layer.v_dim, layer.k_heads * layer.k_dim
    of_model = {
        "tp_size": 1, "num_heads": layer.v_heads, "head_dim": layer.v_dim, "ssm_state_size": layer.k_dim,
        "activation": None if layer.activation == "none" else layer.activation, "intermediate_size": values,
        "n_groups": layer.k_heads, "groups_ssm_state_size": keys, "conv_dim": values + 2 * keys,
        "conv1d": SimpleNamespace(weight=layer.conv_weight[:, None], bias=layer.conv_bias),
        "A": -layer.A_log.exp(), "D": layer.D, "dt_bias": layer.dt_bias,
        "in_proj": lambda rows: (rows, None), "norm": lambda rows, gate: rows, "out_proj": lambda rows: (rows, None),
    }  # fmt: skip
    for name, value in of_model.items():
        setattr(made, name, value)
    return made


def _give_mamba(real: Any, made: Any, given: tuple[Any, Any, Any], layer: StateLayer, batch: Any) -> torch.Tensor:
    """Call the linear backend, as ``models/nemotron_h.py`` does. A row is gate, mixed and dt."""
    mixed, dt, _ = given
    rows = torch.cat([mixed.new_zeros(len(mixed), layer.v_heads * layer.v_dim), mixed, dt], -1)
    out: torch.Tensor = real.linear_attn_backend.forward(
        mixer=made, layer_id=layer.layer_id, hidden_states=rows, output=None, forward_batch=batch,
        use_triton_causal_conv=True,
    )  # fmt: skip
    return out


def _lightning(layer: StateLayer) -> Any:
    return RadixAttention(layer.v_heads, layer.k_dim, 1.0, num_kv_heads=layer.v_heads, layer_id=layer.layer_id)


def _give_lightning(real: Any, made: Any, given: tuple[Any, Any, Any], layer: StateLayer, batch: Any) -> torch.Tensor:
    """Give q, k and v by heads, as ``models/bailing_moe_linear.py`` does."""
    q, k, v = (each.unflatten(-1, (layer.v_heads, -1)).contiguous() for each in given[0].chunk(3, -1))
    out: torch.Tensor = real.forward(q, k, v, layer=made, forward_batch=batch)
    return out


def _own_slopes(real: Any, layer: StateLayer) -> None:
    """Replace the slopes that SGLang computes from the number of a layer by the slopes of the kit's layer."""
    assert layer.slope is not None
    real.linear_attn_backend.tp_slope[layer.layer_id] = layer.slope.view(-1, 1, 1)


@dataclass(frozen=True)
class Kind:
    """SGLang's layer for a kind, and how it is called."""

    make: Callable[[StateLayer], Any]
    """SGLang's layer."""
    forward: Callable[[Any, Any, tuple[Any, Any, Any], StateLayer, Any], torch.Tensor]
    """Called with the wrapper, SGLang's layer, (mixed, a, b), the kit's layer and SGLang's batch."""
    prepare: Callable[[Any, StateLayer], None] = lambda real, layer: None
    """Called once for each layer after the wrapper is made."""


KINDS = {
    "gdn": Kind(_radix, _give_gdn),
    "kda": Kind(_radix, _give_kda),
    "mamba": Kind(_mixer, _give_mamba),
    "lightning": Kind(_lightning, _give_lightning, _own_slopes),
}
"""Kind of a layer -> SGLang's layers and calls."""
