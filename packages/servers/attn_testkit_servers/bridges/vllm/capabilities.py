"""Capabilities of each of vLLM's backends, and the place in vLLM 0.33.0 that documents them.

Each line names a file under ``vllm`` and a definition in it. Features that vLLM intends to support but gets wrong are
declared here, and described in docs/evidence/findings.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attn_testkit.contract import SENDER_RANKS, VLLM, LogSumExp, Receives, Requires, Spans, Sparse

from .. import capabilities as bridged
from ..capabilities import DD, V1, V2, D, Line, V, X
from .state_capabilities import LINES_OF_STATES


@dataclass(frozen=True)
class BridgeCapabilities(bridged.BridgeCapabilities):
    """Everything about one name of vLLM's registry, ``AttentionBackendEnum``."""

    compiled_kernel: bool = False
    """True if the attention kernel is compiled. Without a GPU, the kit's fake computes instead."""
    compiled_store: bool = False
    """True if a compiled operator of ``vllm._C_stable_libtorch`` stores new keys and values. If it does not load, torch
    stores them."""
    compiled_module: str = ""
    """Compiled module without which the class does not run on a GPU."""
    state_layer: str = ""
    """Class of layers that keep a recurrent state; ``registered`` is then a name of ``MambaAttentionBackendEnum``."""
    one_kv_group: bool = False
    """``--disable-hybrid-kv-cache-manager``: windowed layers share a KV group, and so metadata, with the others."""
    capture_sizes: tuple[int, ...] = ()
    """``--cudagraph-capture-sizes``; empty: the sizes of the kit's graphs."""
    layout: str = ""
    """``KVCacheLayout`` that a connector demands; empty: the one that the backend prefers."""
    attention: Mapping[str, Any] = field(default_factory=dict)
    """``--attention-config``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that vLLM reads."""


_BACKEND = "v1/attention/backend.py"
_TRITON = "v1/attention/backends/triton_attn.py"
_UNIFIED = "v1/attention/ops/triton_unified_attention.py"
_FLEX = "v1/attention/backends/flex_attention.py"
_FLASH = "v1/attention/backends/flash_attn.py"
_FLASHINFER = "v1/attention/backends/flashinfer.py"
_TRITON_MLA = "v1/attention/backends/mla/triton_mla.py"
_SPARSE_MLA = "v1/attention/backends/mla/xpu_mla_sparse.py"
_FLASH_MLA = "v1/attention/backends/mla/flashmla.py"
_FLASH_SPARSE = "v1/attention/backends/mla/flashmla_sparse.py"
_MLA = "model_executor/layers/attention/mla_attention.py"
_LAYER = "model_executor/layers/attention/attention.py"
_INPUTS = "v1/worker/gpu/input_batch.py"
_TABLES = "v1/worker/gpu/block_table.py"
_VIEWS = "v1/kv_cache_interface.py"
_PLANNING = "v1/core/kv_cache_planning.py"

_CONVENTIONS = {
    "takes_bare_chains": f"{_BACKEND}:CommonAttentionMetadata",
    "verify_lens": f"{_INPUTS}:_prepare_pos_seq_lens_kernel",
    "padded_requests": f"{_INPUTS}:InputBatch.make_dummy",
    "padding_slots": f"{_TABLES}:BlockTables.get_dummy_slot_mappings",
    "takes_out": f"{_LAYER}:unified_attention_with_output",
    "output_lifetime": f"{_LAYER}:Attention.forward",
    "takes_more_rows": f"{_TABLES}:BlockTables.compute_slot_mappings",
    "narrower_widths": "v1/worker/gpu/cudagraph_utils.py:CudaGraphManager._init_candidates",
}
"""Places in vLLM of the conventions in ``VLLM``. Its drafts begin after a prefill
(``TargetDependentARSpeculator.propose``). Its kernels also accept drafts without a prefix, and the kit tries such
drafts."""
_RUNNER = (
    Line("bounds.max_topk", 1, f"{_BACKEND}:CommonAttentionMetadata"),  # it has no mask and no tree
    Line("needs.cpu_seq_lens", False, f"{_BACKEND}:CommonAttentionMetadata"),  # only a bound of them
    Line("kv_pool.kv_layouts", {"custom"}, f"{_VIEWS}:create_kv_cache_views"),
    *(Line(f"server.{name}", getattr(VLLM, name), place) for name, place in _CONVENTIONS.items()),
)
"""Capabilities that come from the model runner, so every backend has them."""

_OF_KEYS = ("kv_pool.kv_layouts", "server.takes_out", "server.narrower_widths")
_STATES_RUNNER = tuple(line for line in _RUNNER if line.capability not in _OF_KEYS)
"""Capabilities of the model runner for layers without KV cache, which write into their own output."""
_WINDOWS_FIRST = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""Windows [C, columns], as in the kit; vLLM's default is [columns, C]."""


def _of_states(name: str, registered: str, layer: str, environment: Mapping[str, str]) -> BridgeCapabilities:
    lines = (*LINES_OF_STATES[name], *_STATES_RUNNER)
    return BridgeCapabilities(registered, lines, state_layer=layer, environment=environment)


def _hybrid(alone: BridgeCapabilities) -> BridgeCapabilities:
    """Capabilities with softmax layers of ``TRITON_ATTN`` between, in KV cache groups of their own."""
    lines = {line.capability: line for line in alone.lines}
    lines |= {line.capability: line for line in _RUNNER if line.capability == "kv_pool.kv_layouts"}
    state = replace(lines["state"].value, hybrid=True)
    lines |= {"state": Line("state", state, f"{_PLANNING}:get_kv_cache_groups")}
    return replace(alone, lines=tuple(lines.values()))


_LAYERS_DIFFER = (
    Line("kv_pool.kv_groups", True, f"{_PLANNING}:get_kv_cache_groups"),
    Line("heads.heads_by_layer", True, "v1/worker/gpu/attn_utils.py:init_attn_backend"),
)

_SPANS = Spans({D, X}, of_prefix=True, by_layer=True)
"""Spans in eager steps: the model runner has them in every step of a request with an image, and graphs have none."""
_RANGES = "v1/attention/backends/utils.py:compute_mm_prefix_ranges"
_CLAMPED = (Line("spans", _SPANS, _RANGES), Line("spans.wider_than_window", True, f"{_LAYER}:Attention.__init__"))
"""``mm_prefix_clamp_sliding_window``, as for Gemma 4."""
_ALIKE = Line("spans.by_layer", False, f"{_PLANNING}:get_kv_cache_groups")
"""Layers of one KV cache group share metadata, and so spans."""

_TRITON_LINES = (
    Line("eager", {D, V, V1, V2, X, DD}, f"{_TRITON}:TritonAttentionMetadataBuilder.build"),
    # AttentionCGSupport.ALWAYS; a draft by update_draft_decode_metadata.
    Line("graph", {D, V, V1, V2, X, DD}, f"{_TRITON}:TritonAttentionMetadataBuilder.build_for_cudagraph_capture"),
    Line("heads.families", {"mha", "gqa", "mqa"}, f"{_TRITON}:TritonAttentionImpl.__init__"),
    Line("heads.head_dims", {64, 128, 256}, f"{_TRITON}:TritonAttentionBackend.supports_head_size"),
    Line("kv_pool.page_sizes", {16, 32, 64}, f"{_TRITON}:TritonAttentionBackend.get_supported_kernel_block_sizes"),
    Line("heads.gqa_ratios", {2, 4, 8}, f"{_UNIFIED}:unified_attention"),
    Line("bounds.max_q_rows", 16, f"{_UNIFIED}:unified_attention"),  # MAX_3D_QUERY_LEN is 8: from there on 2D
    Line("windows.modes", {D, V, V1, V2, X, DD}, f"{_TRITON}:TritonAttentionBackend.supports_sliding_window"),
    Line("options.non_causal", {V, X}, f"{_TRITON}:TritonAttentionBackend.supports_non_causal"),
    Line("options.logit_cap", True, f"{_TRITON}:TritonAttentionImpl.__init__"),
    Line("options.sinks", True, f"{_TRITON}:TritonAttentionBackend.supports_sink"),
    Line("options.alibi", {D, V, V1, V2, X, DD}, f"{_TRITON}:TritonAttentionImpl.__init__"),
    *_LAYERS_DIFFER,
    *_RUNNER,
)
_DTYPES = (
    Line("precision.dtypes", {"fp16", "bf16", "fp32"}, f"{_TRITON}:TritonAttentionBackend"),
    Line("precision.fp32_products", "tf32", f"{_UNIFIED}:kernel_unified_attention"),
)
_LSE = LogSumExp(base="e", dtype="model", whole={D, V, V2})
_FLASHINFER_PACKAGE = Requires(packages=("flashinfer-python>=0.7.2,<0.8",))
_HALF = Line("precision.dtypes", {"fp16", "bf16"}, f"{_TRITON}:TritonAttentionBackend")

_FLEX_LINES = (
    # Host offsets make the lists of rows: no ragged batch whose lengths are only on the device. No draft's loop in a
    # graph, for supports_draft_decode_metadata_update is False.
    Line("eager", {D, V, V2, X}, f"{_FLEX}:FlexAttentionMetadataBuilder.build"),
    Line("graph", {D, V, V2, X}, f"{_FLEX}:FlexAttentionMetadataBuilder.build_for_cudagraph_capture"),
    Line("heads.families", {"mha", "gqa", "mqa"}, f"{_FLEX}:FlexAttentionImpl.__init__"),
    Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLEX}:FlexAttentionBackend"),
    Line("heads.head_dims", {64, 128}, f"{_FLEX}:FlexAttentionBackend.get_supported_head_sizes"),
    Line("kv_pool.page_sizes", {16, 32, 64}, f"{_FLEX}:FlexAttentionBackend.get_supported_kernel_block_sizes"),
    Line("heads.gqa_ratios", {2, 4, 8}, f"{_FLEX}:FlexAttentionImpl.__init__"),
    Line("bounds.max_q_rows", 16, f"{_FLEX}:FlexAttentionMetadata"),
    Line("windows.modes", {D, V, V2, X}, f"{_FLEX}:FlexAttentionBackend.supports_sliding_window"),
    Line("options.non_causal", {V, X}, f"{_FLEX}:FlexAttentionBackend.supports_non_causal"),
    Line("spans", _SPANS, f"{_FLEX}:FlexAttentionBackend.supports_mm_prefix"),
    # The kernel multiplies values of keys that are masked within a page by 0; vLLM's pool begins as zeros.
    Line("needs.finite_page_tails", {"same"}, "v1/worker/utils.py:allocate_kv_cache"),
    *_RUNNER,
)

_FP16_AND_BF16 = Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASH}:FlashAttentionBackend")


def _flash_attn(*lines: Line, version: int = 3) -> BridgeCapabilities:
    """FlashAttention 3, as on SM90, with AttentionCGSupport.ALWAYS; 2 with UNIFORM_BATCH."""
    graph = {D, V, V1, V2, X, DD} if version == 3 else {D, V, V2, DD}
    return BridgeCapabilities(
        "FLASH_ATTN",
        (
            Line("eager", {D, V, V1, V2, X, DD}, f"{_FLASH}:FlashAttentionMetadataBuilder.build"),
            Line("graph", graph, f"{_FLASH}:FlashAttentionMetadataBuilder.get_cudagraph_support"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_FLASH}:FlashAttentionImpl.__init__"),
            Line("heads.head_dims", {64, 128, 256}, f"{_FLASH}:FlashAttentionBackend.supports_head_size"),
            Line(
                "kv_pool.page_sizes", {16, 32, 64}, f"{_FLASH}:FlashAttentionBackend.get_supported_kernel_block_sizes"
            ),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_FLASH}:FlashAttentionImpl.__init__"),
            Line("bounds.max_q_rows", 16, f"{_FLASH}:FlashAttentionMetadata"),
            Line("windows.modes", {D, V, V1, V2, X, DD}, f"{_FLASH}:FlashAttentionBackend.supports_sliding_window"),
            Line("options.non_causal", {V, X}, f"{_FLASH}:FlashAttentionBackend.supports_non_causal"),
            Line("options.logit_cap", True, f"{_FLASH}:FlashAttentionImpl.__init__"),
            Line("server.takes_none_kv", True, f"{_FLASH}:FlashAttentionBackend"),
            *_LAYERS_DIFFER,
            *_RUNNER,
            *lines,
        ),
        compiled_kernel=True,
        compiled_store=True,
        compiled_module=f"vllm.vllm_flash_attn._vllm_fa{version}_C",
        attention={} if version == 3 else {"flash_attn_version": version},
    )


def _flash_mla(module: str, *lines: Line) -> BridgeCapabilities:
    """FlashMLA's dense decode, which vLLM uses for DeepSeek's models on SM90."""
    return BridgeCapabilities(
        "FLASHMLA",
        (
            # AttentionCGSupport.UNIFORM_BATCH, and no update of its schedule between the forwards of a draft.
            Line("eager", {D, V, V2}, f"{_FLASH_MLA}:FlashMLAMetadataBuilder._build_decode"),
            Line("graph", {D, V, V2}, f"{_MLA}:MLACommonMetadataBuilder.build_for_cudagraph_capture"),
            Line("heads.families", {"mla"}, f"{_FLASH_MLA}:FlashMLABackend"),
            Line("heads.head_dims", {512}, f"{_MLA}:MLACommonBackend.get_supported_head_sizes"),
            Line("heads.mla_rope_dims", {64}, f"{_MLA}:MLACommonBackend.get_supported_head_sizes"),
            Line("heads.gqa_ratios", {16, 64, 128}, f"{_FLASH_MLA}:FlashMLAImpl.forward_mqa"),
            Line("kv_pool.page_sizes", {64}, f"{_FLASH_MLA}:FlashMLABackend.get_supported_kernel_block_sizes"),
            Line("bounds.max_q_rows", 16, f"{_FLASH_MLA}:FlashMLAMetadataBuilder"),  # reorder_batch_threshold is 128
            *_RUNNER,
            *lines,
        ),
        compiled_kernel=True,
        compiled_store=True,  # concat_and_cache_mla
        compiled_module=module,
    )


_ALONE: Mapping[str, BridgeCapabilities] = {
    "triton": BridgeCapabilities("TRITON_ATTN", (*_TRITON_LINES, *_DTYPES, *_CLAMPED)),
    # The builder takes the bucket that is closest to 128 / KV heads for the threshold of its 3D kernel: with one bucket
    # of a request the kernel of large batches runs in small ones.
    "triton_2d": BridgeCapabilities(
        "TRITON_ATTN", (*_TRITON_LINES, *_DTYPES, Line("spans", _SPANS, _RANGES)), capture_sizes=(1,)
    ),
    "triton_invariant": BridgeCapabilities(
        "TRITON_ATTN",
        (
            *_TRITON_LINES,
            *_DTYPES,
            Line("promises.deterministic", True, f"{_TRITON}:TritonAttentionBackend.supports_batch_invariance"),
            Line("promises.batch_invariant", True, f"{_TRITON}:TritonAttentionBackend.supports_batch_invariance"),
        ),
        environment={"VLLM_BATCH_INVARIANT": "1"},
    ),
    "triton_fp8": BridgeCapabilities(
        "TRITON_ATTN",
        (
            *_TRITON_LINES,
            _HALF,
            Line("kv_pool.kv_dtypes", {"fp8_e4m3"}, f"{_TRITON}:TritonAttentionBackend"),
            # The layer rounds queries to FP8 if the implementation takes them so.
            Line("precision.matmul_dtype", "fp8_e4m3", f"{_LAYER}:Attention.forward"),
        ),
    ),
    "triton_per_token_head": BridgeCapabilities(
        "TRITON_ATTN",
        (
            *_TRITON_LINES,
            # In fp16 some cases exceed the limit by up to 1.1 times, for a reason that is not proven.
            Line("precision.dtypes", {"bf16"}, f"{_TRITON}:TritonAttentionBackend"),
            # Its int4_per_token_head is not known to the kit: rows are rotated, and queries in the kernel.
            Line(
                "kv_pool.kv_dtypes",
                {"int8_per_token_head", "fp8_per_token_head"},
                f"{_TRITON}:TritonAttentionBackend.customize_spec",
            ),
        ),
    ),
    "triton_mla": BridgeCapabilities(
        "TRITON_MLA",
        (
            # AttentionCGSupport.UNIFORM_BATCH; a request of more rows than others is a prefill, which is not absorbed.
            Line("eager", {D, V, V2, DD}, f"{_TRITON_MLA}:TritonMLAImpl.forward_mqa"),
            Line("graph", {D, V, V2, DD}, f"{_MLA}:MLACommonMetadataBuilder.build_for_cudagraph_capture"),
            Line("heads.families", {"mla"}, f"{_TRITON_MLA}:TritonMLABackend"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_TRITON_MLA}:TritonMLABackend"),
            Line("kv_pool.kv_dtypes", {"same", "fp8_e4m3"}, f"{_TRITON_MLA}:TritonMLABackend"),
            Line("heads.head_dims", {512}, f"{_MLA}:MLACommonBackend.get_supported_head_sizes"),
            Line("heads.mla_rope_dims", {64}, f"{_MLA}:MLACommonBackend.get_supported_head_sizes"),
            Line("heads.gqa_ratios", {4, 16, 128}, f"{_TRITON_MLA}:TritonMLAImpl.forward_mqa"),
            Line(
                "kv_pool.page_sizes", {16, 32, 64}, f"{_TRITON_MLA}:TritonMLABackend.get_supported_kernel_block_sizes"
            ),
            Line("bounds.max_q_rows", 16, f"{_TRITON_MLA}:TritonMLAImpl.forward_mqa"),
            # In the dtype of the queries, as it is made there. "causal multi-token decode is not supported with DCP".
            Line("lse", replace(_LSE, ranks={D}), f"{_TRITON_MLA}:TritonMLAImpl.forward_mqa"),
            *_RUNNER,
        ),
        compiled_store=True,  # concat_and_cache_mla
    ),
    "flashmla": _flash_mla(
        "vllm._flashmla_C",
        Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASH_MLA}:FlashMLABackend"),
        # Only with ranks does it return a log-sum-exp in rows of heads; its builder takes no rows of drafts then.
        Line("lse", LogSumExp(base="e", ranks={D}), f"{_FLASH_MLA}:FlashMLAImpl.forward_mqa"),
    ),
    "flashmla_fp8": _flash_mla(
        "vllm._flashmla_extension_C",
        # Its outputs are bf16 (``fwd_kvcache_mla_fp8``).
        Line("precision.dtypes", {"bf16"}, f"{_FLASH_MLA}:FlashMLABackend"),
        Line("kv_pool.kv_dtypes", {"fp8_e4m3"}, f"{_FLASH_MLA}:FlashMLABackend"),
        # The kernel rounds probabilities to e4m3 as they are, without a factor.
        Line("precision.matmul_dtype", "fp8_e4m3_unscaled", f"{_MLA}:MLAAttention.forward_impl"),
    ),
    "flashmla_sparse": BridgeCapabilities(
        "FLASHMLA_SPARSE",
        (
            # AttentionCGSupport.UNIFORM_BATCH, and no update of its metadata between the forwards of a draft.
            Line("eager", {D, V, V2, X}, f"{_FLASH_SPARSE}:FlashMLASparseMetadataBuilder.build"),
            Line("graph", {D, V, V2}, f"{_FLASH_SPARSE}:FlashMLASparseMetadataBuilder"),
            Line("heads.families", {"mla"}, f"{_FLASH_SPARSE}:FlashMLASparseBackend.is_mla"),
            Line("precision.dtypes", {"bf16"}, f"{_FLASH_SPARSE}:FlashMLASparseBackend"),
            Line("heads.head_dims", {512}, f"{_FLASH_SPARSE}:FlashMLASparseBackend.get_supported_head_sizes"),
            Line("heads.mla_rope_dims", {64}, f"{_FLASH_SPARSE}:FlashMLASparseBackend.get_supported_head_sizes"),
            # Queries are padded to 64 heads.
            Line("heads.gqa_ratios", {16, 64, 128}, f"{_FLASH_SPARSE}:FlashMLASparseImpl._bf16_flash_mla_kernel"),
            Line("kv_pool.page_sizes", {64}, f"{_FLASH_SPARSE}:FlashMLASparseBackend.get_supported_kernel_block_sizes"),
            Line("bounds.max_q_rows", 16, f"{_FLASH_SPARSE}:FlashMLASparseImpl.forward_mqa"),
            Line(
                "sparse",
                # The kernel reads 128 indices at a time (``params.topk % (2*B_TOPK) == 0``).
                Sparse(topk={128, 2048}, holes=True, empty_rows=True),
                "v1/attention/backends/mla/sparse_utils.py:triton_convert_req_index_to_global_index",
            ),
            *_RUNNER,
        ),
        compiled_kernel=True,
        compiled_store=True,  # concat_and_cache_mla, concat_mla_q
        compiled_module="vllm._flashmla_C",
        attention={"sparse_mla_force_mqa": True},
    ),
    # Registered for Intel's GPUs; all of it is Python and Triton. It reads ``topk_indices_buffer``, like the sparse
    # classes of FlashMLA and FlashInfer, whose kernels are compiled.
    "xpu_mla_sparse": BridgeCapabilities(
        "XPU_MLA_SPARSE",
        (
            # AttentionCGSupport.NEVER, and no update of its metadata between the forwards of a draft. Host offsets make
            # the list of rows: no ragged batch whose lengths are only on the device.
            Line("eager", {D, V, V2, X}, f"{_SPARSE_MLA}:XPUMLASparseMetadataBuilder.build"),
            Line("heads.families", {"mla"}, f"{_SPARSE_MLA}:XPUMLASparseBackend.is_mla"),
            Line("precision.dtypes", {"bf16"}, f"{_SPARSE_MLA}:XPUMLASparseImpl._forward_bf16_kv"),
            Line("heads.head_dims", {512}, f"{_SPARSE_MLA}:XPUMLASparseBackend.get_supported_head_sizes"),
            Line("heads.mla_rope_dims", {64}, f"{_SPARSE_MLA}:XPUMLASparseBackend.get_supported_head_sizes"),
            Line("heads.gqa_ratios", {16, 64}, f"{_SPARSE_MLA}:XPUMLASparseImpl._forward_bf16_kv"),
            Line("kv_pool.page_sizes", {16, 64}, f"{_SPARSE_MLA}:XPUMLASparseBackend.customize_spec"),
            Line("bounds.max_q_rows", 16, f"{_SPARSE_MLA}:XPUMLASparseImpl.forward_mqa"),
            Line(
                "sparse",
                Sparse(topk={128, 2048}, holes=True, empty_rows=True),
                "v1/attention/backends/mla/sparse_utils.py:triton_convert_req_index_to_global_index",
            ),
            *_RUNNER,
        ),
        compiled_store=True,  # concat_and_cache_mla
    ),
    "flash_attn": _flash_attn(_FP16_AND_BF16),
    # A model with ALiBi has this version on every GPU (``get_flash_attn_version``).
    "flash_attn_2": _flash_attn(
        _FP16_AND_BF16,
        Line("options.alibi", {D, V, V1, V2, X, DD}, f"{_FLASH}:FlashAttentionImpl.__init__"),
        version=2,
    ),
    # The kernel accepts only sinks in bf16, and a model of fp16 has them in fp16 (``make_attention_sink``).
    "flash_attn_sinks": _flash_attn(
        Line("precision.dtypes", {"bf16"}, f"{_FLASH}:FlashAttentionBackend"),
        Line("options.sinks", True, f"{_FLASH}:FlashAttentionImpl.__init__"),
    ),
    "flash_attn_fp8": _flash_attn(
        # Its outputs are bf16 (``mha_fwd``).
        Line("precision.dtypes", {"bf16"}, f"{_FLASH}:FlashAttentionBackend"),
        Line("kv_pool.kv_dtypes", {"fp8_e4m3"}, f"{_FLASH}:FlashAttentionBackend.supports_kv_cache_dtype"),
        Line("precision.matmul_dtype", "fp8_e4m3", f"{_LAYER}:Attention.forward"),
        Line("precision.q_scale", "static", f"{_FLASH}:FlashAttentionImpl.forward"),
    ),
    "flashinfer": BridgeCapabilities(
        "FLASHINFER",
        (
            # Its wrappers, which plan on the host. Requests of several rows are prefills, and those have no graphs.
            Line("eager", {D, V, V2, X}, f"{_FLASHINFER}:FlashInferMetadataBuilder.build"),
            Line("graph", {D}, f"{_FLASHINFER}:FlashInferMetadataBuilder.get_cudagraph_support"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_FLASHINFER}:FlashInferImpl.__init__"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASHINFER}:FlashInferBackend"),
            Line("heads.head_dims", {64, 128, 256}, f"{_FLASHINFER}:FlashInferBackend.get_supported_head_sizes"),
            Line(
                "kv_pool.page_sizes", {16, 32, 64}, f"{_FLASHINFER}:FlashInferBackend.get_supported_kernel_block_sizes"
            ),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_FLASHINFER}:FlashInferImpl.__init__"),
            Line("bounds.max_q_rows", 16, f"{_FLASHINFER}:FIPrefill"),
            Line("windows.modes", {D, V, V2, X}, f"{_FLASHINFER}:FlashInferBackend.supports_sliding_window"),
            Line("options.non_causal", {V, X}, f"{_FLASHINFER}:FlashInferBackend.supports_non_causal"),
            # All layers that share metadata have one scale and one soft cap.
            Line("options.any_scaling", False, "v1/attention/backends/utils.py:infer_global_hyperparameters"),
            Line("server.takes_none_kv", True, f"{_FLASHINFER}:FlashInferBackend"),
            *_LAYERS_DIFFER,
            *(line for line in _RUNNER if line.capability != "needs.cpu_seq_lens"),
            Line("needs.cpu_seq_lens", True, f"{_FLASHINFER}:FlashInferMetadataBuilder.build"),
            Line("requires", _FLASHINFER_PACKAGE, f"{_FLASHINFER}:FlashInferBackend"),
        ),
        compiled_kernel=True,
        compiled_store=True,
        attention={"use_trtllm_attention": False},
        environment={"VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": str(16 << 20)},
    ),
    "flex": BridgeCapabilities(
        "FLEX_ATTENTION", (*_FLEX_LINES, *_LAYERS_DIFFER), compiled_kernel=True, compiled_store=True
    ),
    "flex_merged": BridgeCapabilities(
        "FLEX_ATTENTION",
        (*_FLEX_LINES, Line("windows.layers", "one", f"{_PLANNING}:_promote_local_kv_cache_specs"), _ALIKE),
        compiled_kernel=True,
        compiled_store=True,
        one_kv_group=True,
    ),
    "gdn": _of_states("gdn", "GDN_ATTN", "QwenGatedDeltaNetAttention", _WINDOWS_FIRST),
    "mamba2": _of_states("mamba2", "MAMBA2", "MambaMixer2", _WINDOWS_FIRST),
    "bailing": _of_states("bailing", "LINEAR", "BailingMoELinearAttention", {}),
    "linear": _of_states("linear", "LINEAR", "MiniMaxText01LinearAttention", {}),
}
_NIXL = "distributed/kv_transfer/kv_connector/v1/nixl"


def _receiving(name: str, own: int, receives: Receives) -> BridgeCapabilities:
    """Capabilities of a decode server with ``NixlConnector``, which begins no request. ``own``: its page size."""
    lines = {line.capability: line for line in _ALONE[name].lines} | {
        "receives": Line("receives", receives, f"{_NIXL}/tp_mapping.py:compute_tp_mapping"),
        "eager": Line(
            "eager", _ALONE[name].capabilities.eager & {D, X}, f"{_NIXL}/pull_worker.py:NixlPullConnectorWorker"
        ),
        "graph": Line("graph", set(), f"{_NIXL}/pull_worker.py:NixlPullConnectorWorker"),
        "kv_pool.page_sizes": Line(
            "kv_pool.page_sizes",
            {own},
            f"{_NIXL}/base_worker.py:NixlBaseConnectorWorker._validate_remote_agent_handshake",
        ),
    }
    # get_required_kvcache_layout: heads before slots, so that a block's heads are a part of its bytes.
    return replace(_ALONE[name], lines=tuple(lines.values()), layout="LBHNC")


CAPABILITIES: Mapping[str, BridgeCapabilities] = {
    **_ALONE,
    "triton_pd": _receiving("triton", 16, Receives({16}, {"side-by-side-hnd"}, set(SENDER_RANKS))),
    # Not smaller blocks, which are paired wrongly: docs/evidence/findings/vllm-nixl-blocks.md.
    "triton_mla_pd": _receiving("triton_mla", 64, Receives({64}, ranks=set(SENDER_RANKS))),
    **{f"{name}_hybrid": _hybrid(_ALONE[name]) for name in ("gdn", "mamba2")},
}
"""Name after ``vllm:`` -> declared capabilities."""

OF_VLLM = (
    "b12x", "cpu_attn", "cutlass_mla", "flash_attn_diffkv", "flash_attn_mla", "flash_attn_mla_sparse",
    "flashinfer_mla", "flashinfer_mla_sparse", "hpc_attn", "rocm_aiter_fa",
    "rocm_aiter_mla", "rocm_attn", "tokenspeed_mla", "triton_attn_diffkv", "triton_flash_attn", "triton_flashinfer",
    "turboquant",
)  # fmt: skip
"""Other names of vLLM's registry, in small letters: for hardware, formats or models that the kit does not have."""
