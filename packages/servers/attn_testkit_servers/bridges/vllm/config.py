"""A VllmConfig of vLLM 0.33.0 with everything that attention layers, builders and KV cache planning read.

Its parts are vLLM's own objects. Two are not, because vLLM makes them only from a checkpoint: the model's
configuration, and the object around the parts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    KernelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from vllm.distributed import parallel_state

from attn_testkit.contract import AttentionLayer, BackendContext

from .capabilities import BridgeCapabilities
from .numbers import NUMBERS, capture_sizes

NOPE = 128
"""``qk_nope_head_dim`` and ``v_head_dim`` of DeepSeek's models: absorbed layers have none, but builders read it."""


def one_rank() -> None:
    """Set a single rank, because layers of states and of sparse MLA query ranks first."""
    if parallel_state._TP is None:
        parallel_state._TP = SimpleNamespace(world_size=1, rank_in_group=0)


def _speculation(drafts: int) -> Any:
    """A speculative configuration with a number of draft tokens; None without any."""
    if not drafts:
        return None
    return SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=False)


def _text_config(first: AttentionLayer) -> SimpleNamespace:
    """Attributes of a model that builders of sparse MLA read."""
    rope = first.head_dim - first.kv_lora_rank if first.is_mla else 0
    return SimpleNamespace(
        index_topk=first.topk, q_lora_rank=None, kv_lora_rank=first.kv_lora_rank, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=rope, v_head_dim=NOPE,
    )  # fmt: skip


def make_config(declared: BridgeCapabilities, context: BackendContext, blocks: int, layout: str) -> Any:
    """The configuration of a server with these layers, ``blocks`` KV blocks and the flags of ``declared``.

    ``layout``: name of a ``KVCacheLayout``, which the engine settles before it plans.
    """
    first = context.layers[0]
    numbers = {each.name: each.value(context) for each in NUMBERS}
    scheduler = SchedulerConfig(
        max_num_seqs=numbers["max_num_seqs"], max_num_batched_tokens=numbers["max_num_batched_tokens"],
        max_model_len=numbers["max_model_len"], is_encoder_decoder=False,
        disable_hybrid_kv_cache_manager=declared.one_kv_group,
    )  # fmt: skip
    cache = CacheConfig(
        block_size=numbers["block_size"],
        # The kit's formats with a scale per token and head have vLLM's names.
        cache_dtype="auto" if context.kv_pool.dtype == context.dtype else context.kv_pool.row_format or "fp8",
        enable_prefix_caching=False,
    )
    sizes = list(declared.capture_sizes or capture_sizes(context))
    cache.num_gpu_blocks, cache.kv_cache_layout = blocks, layout
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: -(-first.tp_q_head_num // context.dcp_world_size),
            get_num_kv_heads=lambda parallel: first.tp_k_head_num,
            get_head_size=lambda: max(layer.head_dim for layer in context.layers),
            max_model_len=numbers["max_model_len"], dtype=context.dtype, is_mm_prefix_lm=context.max_spans > 0,
            is_diffusion=False, rswa_window=None, hf_config=SimpleNamespace(model_type="tiny"),
            hf_text_config=_text_config(first),
            model_arch_config=SimpleNamespace(total_num_attention_heads=first.tp_q_head_num),
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=context.dcp_world_size, decode_context_parallel_size=context.dcp_world_size,
            cp_kv_cache_interleave_size=context.cp_kv_cache_interleave_size, distributed_executor_backend="mp",
        ),
        scheduler_config=scheduler,
        compilation_config=CompilationConfig(
            # Operators that vLLM has in torch as well as compiled, it runs in torch where it compiles the model.
            custom_ops=["none"],
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=max(numbers["max_cudagraph_capture_size"], sizes[-1]),
        ),
        cache_config=cache,
        attention_config=AttentionConfig(**declared.attention),
        kernel_config=KernelConfig(),
        speculative_config=_speculation(numbers["num_speculative_tokens"]),
        num_speculative_tokens=numbers["num_speculative_tokens"],
        use_v2_model_runner=True,
    )  # fmt: skip
