"""The attributes of SGLang 0.5.23's model runner that attention backends read, and the configuration of its process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from attn_testkit.contract import BackendContext, ForwardMode

from .capabilities import BridgeCapabilities
from .pools import pool_of, set_ranks

_SPECULATIVE = frozenset(ForwardMode) - {ForwardMode.DECODE, ForwardMode.EXTEND}
_KV_SPLITS = 8
"""The default of ``--triton-attention-num-kv-splits``."""
_published: list[Any] = []


def _window_of(context: BackendContext) -> int | None:
    return None if context.sliding_window_size < 0 else context.sliding_window_size


def publish(declared: BridgeCapabilities, context: BackendContext) -> None:
    """Set SGLang's configuration and ranks of the process, which are those of the last instance."""
    while _published:
        _published.pop().restore()
    speculates = bool(context.modes & _SPECULATIVE)
    override = get_context().override_server_args(
        attention_backend=declared.registered,
        page_size=context.page_size,
        chunked_prefill_size=-1,
        speculative_algorithm="EAGLE" if speculates else None,
        speculative_eagle_topk=max(context.topk, context.draft_branches) or None,
        speculative_num_draft_tokens=context.num_draft_tokens if speculates else None,
        speculative_num_steps=context.speculative_num_steps if speculates else None,
        triton_attention_num_kv_splits=_KV_SPLITS,
        tp_size=context.tp_size,
        attn_dp_size=context.tp_size // context.attn_tp_size,
        **declared.options,
    )
    override.install()
    _published.append(override)
    set_ranks()


class _ModelConfig:
    """Attributes of a model that backends read; dims are those of the kit's layers, and heads those of all ranks."""

    def __init__(self, context: BackendContext, scaling: float) -> None:
        first, window = context.layers[0], _window_of(context)
        rope = first.head_dim - first.kv_lora_rank if first.is_mla else 0
        ranks = context.attn_tp_size
        heads, kv_heads = first.tp_q_head_num * ranks, first.tp_k_head_num * (1 if first.is_mla else ranks)
        self.most_heads = context.num_attention_heads
        self.attention_arch = AttentionArch.MLA if first.is_mla else AttentionArch.MHA
        self.context_len, self.dtype, self.scaling = context.max_context_len, context.dtype, scaling
        self.num_attention_heads, self.num_key_value_heads = heads, kv_heads
        self.head_dim = first.head_dim
        self.v_head_dim = self.swa_v_head_dim = first.v_head_dim
        self.hidden_size = heads * first.v_head_dim
        self.kv_lora_rank, self.qk_rope_head_dim = first.kv_lora_rank or None, rope
        self.qk_nope_head_dim = first.kv_lora_rank
        self.is_generation, self.is_draft_model = True, False
        self.is_encoder_decoder = self.is_multimodal = self.model_is_mrope = False
        self.quantization = self.attention_chunk_size = self.linear_attn_registry_result = None
        self.sliding_window_size = window
        self.is_hybrid_swa = window is not None
        self.is_local_attention_model = False  # Llama 4's chunks, which the bridge does not declare
        self.hf_config = self.hf_text_config = SimpleNamespace(
            architectures=["DeepseekV32ForCausalLM" if first.topk else "TinyForCausalLM"],
            index_topk=first.topk or None, hidden_size=self.hidden_size, head_dim=self.head_dim,
            num_attention_heads=heads, num_key_value_heads=kv_heads,
        )  # fmt: skip
        self.hf_config.get_text_config = lambda: self.hf_text_config

    def get_num_attention_heads(self, tp_size: int) -> int:
        return self.num_attention_heads // tp_size

    def get_max_num_attention_heads(self) -> int:
        return self.most_heads

    def get_num_kv_heads(self, tp_size: int, dcp_size: int = 1) -> int:
        return max(1, self.num_key_value_heads // tp_size)


class _Runner(SimpleNamespace):
    """A namespace with the one method that constructors call."""

    verify_width: int

    def decode_num_tokens_per_req(self) -> int:
        return self.verify_width


def make_runner(declared: BridgeCapabilities, context: BackendContext, scaling: float, pool: Any = None) -> Any:
    """Make the argument of the constructors in SGLang's registry, and configure the process.

    ``scaling``: the model's scaling, for backends that plan with it instead of the layer's. ``pool``: SGLang's KV pool;
    None: the pool that SGLang laid out for the kit.
    """
    publish(declared, context)
    name = declared.registered
    device, page, pool = context.device.type, context.page_size, pool or pool_of(context.kv_pool)
    window, first = _window_of(context), context.layers[0]
    rows, columns = context.req_to_token.shape
    allocator = SimpleNamespace(page_size=page, get_kvcache=lambda: pool)
    speculates = bool(context.modes & _SPECULATIVE)
    return _Runner(
        device=device, gpu_id=context.device.index or 0, dtype=context.dtype, page_size=page,
        kv_cache_dtype=context.kv_pool.dtype, kv_cache_dtype_str="auto",
        prefill_attention_backend_str=name, decode_attention_backend_str=name, draft_attention_backend=None,
        model_config=_ModelConfig(context, scaling), model=torch.nn.Module(), is_draft_worker=False,
        max_running_requests=context.max_bs,
        spec_algorithm=SpeculativeAlgorithm.EAGLE if speculates else SpeculativeAlgorithm.NONE,
        verify_width=context.num_draft_tokens if ForwardMode.TARGET_VERIFY in context.modes else 1,
        # A server has no batch of more requests than its table has rows; the kit's table has only those of the case.
        req_to_token_pool=SimpleNamespace(
            size=max(rows - 1, context.max_bs), max_context_len=columns, req_to_token=context.req_to_token,
            device=device,
        ),
        token_to_kv_pool=pool, token_to_kv_pool_allocator=allocator,
        kv_index_translator=KVIndexTranslator(
            req_to_token=context.req_to_token, token_to_kv_pool_allocator=allocator, token_to_kv_pool=pool,
            page_size=page, device=device,
        ),
        sliding_window_size=window, is_hybrid_swa=window is not None, use_mla_backend=first.is_mla,
        attention_chunk_size=None, hisparse_coordinator=None, init_new_workspace=True, canary_manager=None,
        hybrid_gdn_config=None, hybrid_lightning_config=None, kimi_linear_config=None, linear_attn_model_spec=None,
        mambaish_config=None, server_args=get_context().server_args, plan_stream_for_flashinfer=None,
    )  # fmt: skip
