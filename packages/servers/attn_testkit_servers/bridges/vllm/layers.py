"""The attention layers of a model: vLLM's own ``Attention``, and for MLA a layer around its implementation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.vllm import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import _DecodeConcatQuantFP8
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode, is_quantized_kv_cache
from vllm.v1.worker.workspace import init_workspace_manager

from attn_testkit.contract import AttentionLayer, BackendContext, Capabilities

from .config import NOPE, one_rank
from .ranks import become_rank, heads_of_rank, make_manager


def name_of(layer: AttentionLayer) -> str:
    """Name of a layer in ``static_forward_context``, in metadata and in slot mappings."""
    return f"model.layers.{layer.layer_id}.attn"


def make_layers(real: Any, config: Any, context: BackendContext, declared: Capabilities) -> dict[str, Any]:
    """Name -> layer, each bound to its KV cache; ``config`` knows them afterwards.

    ``declared``: windows may narrow bidirectional spans, as those of Gemma 4 do, and queries may have a scale of the
    checkpoint.
    """
    made: dict[str, Any] = {}
    clamp, scales_queries = declared.spans.wider_than_window, declared.precision.q_scale == "static"
    if any(layer.topk for layer in context.layers):
        # As the model runner does. Scratch memory of all layers is shared, and grows with the largest.
        init_workspace_manager(context.device)
        one_rank()
    become_rank(context)
    # The loader of a model makes its layers under their device, where implementations make tensors of slopes.
    with set_current_vllm_config(config), torch.device(context.device):
        for layer in context.layers:
            found = _latent(real, config, layer, context) if layer.is_mla else _attention(real, config, layer, clamp)
            found.bind_kv_cache(cache_of(context, layer, found))
            _set_scales(found, layer, context.device, layer.q_scale if scales_queries else 1.0)
            if found.kv_cache_dtype.endswith("per_token_head"):
                # A server's first forward does it, before any request has keys: all scales of the pool become 1.
                found.impl._ensure_scale_caches(found.kv_cache)
            made[name_of(layer)] = found
    return made


def _attention(real: Any, config: Any, layer: AttentionLayer, clamp: bool) -> Any:
    window = layer.sliding_window_size
    return Attention(
        layer.tp_q_head_num, layer.head_dim, layer.scaling, layer.tp_k_head_num, cache_config=config.cache_config,
        logits_soft_cap=layer.logit_cap or None,
        alibi_slopes=None if layer.alibi_slopes is None else layer.alibi_slopes.tolist(),
        per_layer_sliding_window=None if window < 0 else window + 1,  # it counts the row's own key
        prefix=name_of(layer), attn_backend=real, mm_prefix_clamp_sliding_window=clamp,
        # Parameters of a model have its dtype (``make_attention_sink``).
        **({} if layer.sinks is None else {"sinks": layer.sinks.to(config.model_config.dtype)}),
    )  # fmt: skip


def _latent(real: Any, config: Any, layer: AttentionLayer, context: BackendContext) -> Any:
    made = _LatentLayer(real, config, layer, context)
    config.compilation_config.static_forward_context[name_of(layer)] = made
    return made


class _QuantizedQueries(_DecodeConcatQuantFP8):  # type: ignore[misc]
    """Both parts of a query as one in e4m3, which ``MLAAttention.forward_impl`` gives implementations that take it."""

    def __init__(self) -> None:
        super().__init__(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=True)


class _LatentLayer(torch.nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """``MLAAttention`` without the projections on both sides of it: the kit's rows are absorbed ones."""

    def __init__(self, real: Any, config: Any, layer: AttentionLayer, context: BackendContext) -> None:
        super().__init__()
        self.real, self.kv_cache_dtype = real, config.cache_config.cache_dtype
        self.num_heads, self.num_kv_heads, self.head_size = heads_of_rank(context, layer), 1, layer.head_dim
        self.q_lora_rank, self.kv_lora_rank = None, layer.kv_lora_rank
        self.qk_nope_head_dim = self.v_head_dim = NOPE
        self.qk_rope_head_dim = layer.head_dim - layer.kv_lora_rank
        self.prefill_backend = None if layer.topk else _NoPrefill()
        self.quantized_queries = _QuantizedQueries() if is_quantized_kv_cache(self.kv_cache_dtype) else None
        self.selected = _indices(config, layer, context.device)
        """Indices of selected keys, which vLLM's indexer writes and the implementation reads; None without any."""
        sparse = {} if self.selected is None else {"topk_indices_buffer": self.selected}
        self.impl = real.get_impl_cls()(
            num_heads=self.num_heads, head_size=self.head_size, scale=layer.scaling, num_kv_heads=1,
            alibi_slopes=None, sliding_window=None, kv_cache_dtype=self.kv_cache_dtype, logits_soft_cap=None,
            attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, q_lora_rank=None,
            kv_lora_rank=self.kv_lora_rank, qk_nope_head_dim=NOPE, qk_rope_head_dim=self.qk_rope_head_dim,
            qk_head_dim=NOPE + self.qk_rope_head_dim, v_head_dim=NOPE, kv_b_proj=None,
            **sparse,
        )  # fmt: skip
        self.dcp_manager = make_manager(config, context.device, self)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """[blocks, 1, block size, content] without the heads, as ``MLAAttention`` keeps it."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> Any:
        """Backend class, as in ``MLAAttention``."""
        return self.real

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """KV cache specification, as in ``MLAAttention``."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=1, max_tp_shards=1, head_size=self.head_size,
            dtype=self.kv_cache.dtype, cache_dtype_str=self.kv_cache_dtype,
            kv_quant_mode=get_kv_quant_mode(self.kv_cache_dtype),
        )  # fmt: skip


def _indices(config: Any, layer: AttentionLayer, device: torch.device) -> torch.Tensor | None:
    if not layer.topk:
        return None
    rows = config.scheduler_config.max_num_batched_tokens
    return torch.full((rows, layer.topk), -1, dtype=torch.int32, device=device)


class _NoPrefill(SimpleNamespace):
    """A placeholder for MLA's prefill, which is another computation; builders read only its name."""

    def clone(self) -> _NoPrefill:
        return self

    def get_name(self) -> str:
        return "none"


def cache_of(context: BackendContext, layer: AttentionLayer, made: Any) -> torch.Tensor:
    """[blocks, heads, block size, content]: the KV cache of a layer, as the model runner allocates it."""
    cache, kv_dtype = context.group_of(layer).kv_pool.get_layer_buffer(layer.layer_id), made.kv_cache_dtype
    if kv_dtype == "auto":
        return cache
    return cache.view(torch.int8 if kv_dtype.startswith("int8") else torch.uint8)


def _set_scales(made: Any, layer: AttentionLayer, device: torch.device, q_scale: float) -> None:
    for name, scale in (("q", q_scale), ("k", layer.k_scale), ("v", layer.v_scale)):
        setattr(made, f"_{name}_scale", torch.tensor(scale, dtype=torch.float32, device=device))
        setattr(made, f"_{name}_scale_float", scale)
