"""Capabilities of each of SGLang's backends, and the place in SGLang 0.5.23 that documents them.

Each line names a file under ``sglang/srt`` and a function in it. Features that SGLang intends to support but gets wrong
are declared here, and described in docs/evidence/findings-sglang.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attn_testkit.contract import SENDER_RANKS, SGLANG, Offloads, Receives, Requires, Sparse

from ..capabilities import DD, V1, V2, D, Line, V, X
from .bridge_capabilities import BridgeCapabilities as BridgeCapabilities
from .state_capabilities import OF_STATES

_TRITON = "layers/attention/triton_backend.py"
_EXTEND_KERNEL = "../kernels/ops/attention/extend_attention.py"
_DECODE_KERNEL = "../kernels/ops/attention/decode_attention.py"
_FLASHINFER = "layers/attention/flashinfer_backend.py"
_FLASHINFER_MLA = "layers/attention/flashinfer_mla_backend.py"
_TRTLLM_MHA = "layers/attention/trtllm_mha_backend.py"
_TRTLLM_MLA = "layers/attention/trtllm_mla_backend.py"
_CUTEDSL = "layers/attention/cutedsl_mla_backend.py"
_FLASH = "layers/attention/flashattention_backend.py"
_NATIVE = "layers/attention/torch_native_backend.py"
_DSA = "layers/attention/dsa_backend.py"
_POOLS = "mem_cache/memory_pool.py"

_FLASHINFER_PACKAGE = Requires(packages=("flashinfer-python>=0.7.2,<0.8",))
# Kernels that SGLang itself brings compiled, or compiles for a GPU when a backend is made: no fake is of those.
_COMPILED = ("sglang-kernel>=0.4.10",)
_OF_SM100 = Requires(sm=(100, 103), packages=(*_COMPILED, "flashinfer-python>=0.7.2,<0.8"))
# Its flash_ops is the same function from this release on, which is the last one for torch 2.11.
_OF_SM90 = Requires(sm=(90, 90), packages=("sglang-kernel>=0.4.6",))

_MHA_POOL = Line("kv_pool.kv_layouts", {"custom"}, f"{_POOLS}:MHATokenToKVPool._create_buffers_normal")
_MLA_POOL = Line("kv_pool.kv_layouts", {"custom"}, f"{_POOLS}:MLATokenToKVPool._create_buffers")
_SERVER = Line("server", SGLANG, "layers/radix_attention.py:RadixAttention.forward")
_WINDOW_OF_ONE = Line("windows.smallest", 1, "layers/radix_attention.py:RadixAttention.__init__")
_OF_TRTLLM_MLA = (
    Line("heads.families", {"mla"}, f"{_POOLS}:MLATokenToKVPool"),
    Line("heads.head_dims", {512}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.__init__"),
    Line("heads.mla_rope_dims", {64}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.__init__"),
    Line("kv_pool.page_sizes", {32, 64}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.__init__"),
    Line("bounds.max_q_rows", 8, f"{_TRTLLM_MLA}:TRTLLMMLABackend.forward_extend"),
    Line("bounds.max_topk", 1, f"{_TRTLLM_MLA}:TRTLLMMLABackend.forward_extend"),
    Line("needs.cpu_seq_lens", False, f"{_TRTLLM_MLA}:TRTLLMMLABackend"),
    _MLA_POOL,
    _SERVER,
    Line("requires", _OF_SM100, f"{_TRTLLM_MLA}:TRTLLMMLABackend.__init__"),
)
"""CuteDslMLABackend inherits them from TRTLLMMLABackend."""

_HEADS_OF_FLASH = (
    Line("heads.families", {"mha", "gqa", "mqa"}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
    Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
    Line("heads.head_dims", {64, 128}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
    Line("kv_pool.page_sizes", {1, 16, 64}, f"{_FLASH}:FlashAttentionBackend.__init__"),
    Line("heads.gqa_ratios", {2, 4, 8}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
    _MHA_POOL,
    _SERVER,
)
_STEPS_OF_FLASH = (
    # Not the v1 worker's extend, which has no extend_prefix_lens_cpu any more.
    Line("eager", {D, V, V2, X}, f"{_FLASH}:FlashAttentionBackend.init_forward_metadata"),
    Line("graph", {D, V, V2}, f"{_FLASH}:FlashAttentionBackend.init_cuda_graph_state"),
    Line("bounds.max_q_rows", 16, f"{_FLASH}:FlashAttentionBackend.forward_extend"),
    Line("needs.cpu_seq_lens", False, f"{_FLASH}:FlashAttentionBackend.__init__"),
)
_OF_FLASH = (
    *_STEPS_OF_FLASH,
    *_HEADS_OF_FLASH,
    Line("bounds.max_topk", 4, f"{_FLASH}:FlashAttentionBackend.__init__"),
    Line("windows.modes", {D, V, V2, X}, f"{_FLASH}:FlashAttentionBackend.forward_extend"),
    Line("windows.layers", "one", f"{_FLASH}:FlashAttentionBackend.__init__"),
    _WINDOW_OF_ONE,
)
_FLASH_3 = Line("requires", _OF_SM90, "layers/attention/attention_registry.py:create_flashattention_v3_backend")

_OF_DSA = (
    Line("heads.families", {"mla"}, f"{_POOLS}:DSATokenToKVPool"),
    Line("precision.dtypes", {"bf16"}, "../kernels/ops/attention/dsa/triton_sparse_mla.py:_validate_input_dtypes"),
    Line("heads.head_dims", {512}, f"{_DSA}:DeepseekSparseAttnBackend._forward_triton_decode"),
    Line("heads.mla_rope_dims", {64}, f"{_DSA}:DeepseekSparseAttnBackend._forward_triton_decode"),
    Line("kv_pool.page_sizes", {64}, f"{_POOLS}:DSATokenToKVPool.__init__"),
    Line("heads.gqa_ratios", {16, 64}, f"{_DSA}:_validate_triton_sparse_mla_backend"),
    Line("needs.cpu_seq_lens", False, f"{_DSA}:DeepseekSparseAttnBackend"),
    Line("server.eager_without_waits", False, f"{_DSA}:DeepseekSparseAttnBackend.init_forward_metadata"),
    _MLA_POOL,
    _SERVER,
)
_DSA_TOPK = {64, 2048}
"""Widths of ``topk_indices``. All models use 2,048, for which ``transform_index`` has its own kernel."""
_DSA_OPTIONS = {"dsa_prefill_backend": "triton_sparse_mla", "dsa_decode_backend": "triton"}
_DSA_ENVIRONMENT = {
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",  # the schedule of the indexer's scores without DeepGEMM
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # an extend of short requests is sparse, too
}

_ALONE: Mapping[str, BridgeCapabilities] = {
    "torch_native": BridgeCapabilities(
        "torch_native",
        (
            # Verify would want seq_lens with the new tokens; graphs have no hook.
            Line("eager", {D, V1, V2, X}, f"{_NATIVE}:TorchNativeAttnBackend.forward_extend"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_decode"),
            Line(
                "precision.dtypes",
                {"fp16", "bf16", "fp32"},
                f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend",
            ),
            Line("heads.head_dims", {64, 128}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("bounds.max_q_rows", 16, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("windows.modes", {D, V1, V2, X}, f"{_NATIVE}:TorchNativeAttnBackend._make_sliding_window_mask"),
            Line("windows.layers", "one", "model_executor/model_runner.py:ModelRunner"),
            _WINDOW_OF_ONE,
            _MHA_POOL,
            _SERVER,
        ),
    ),
    "triton": BridgeCapabilities(
        "triton",
        (
            Line("eager", {D, V, V1, V2, X}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_TRITON}:TritonAttnBackend._apply_cuda_graph_metadata"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_DECODE_KERNEL}:decode_attention_fwd"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_EXTEND_KERNEL}:extend_attention_fwd"),
            Line("heads.head_dims", {64, 128, 256}, f"{_EXTEND_KERNEL}:_get_block_sizes_for_extend_attention"),
            Line("heads.wider_keys", {64}, f"{_POOLS}:MHATokenToKVPool.__init__"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices"),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_DECODE_KERNEL}:_decode_grouped_att_m_fwd"),
            Line("bounds.max_q_rows", 16, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("bounds.max_topk", 4, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            # Not in decode, whose lists of keys are one short of the extend kernel's windows: sglang #32087.
            Line("windows.modes", {V, V1, V2, X}, f"{_TRITON}:update_sliding_window_buffer"),
            Line("windows.layers", "one", f"{_TRITON}:TritonAttnBackend.__init__"),
            _WINDOW_OF_ONE,
            Line("options.logit_cap", True, f"{_TRITON}:logit_capping_mod"),
            Line("options.sinks", True, f"{_TRITON}:TritonAttnBackend.forward_decode"),
            Line("needs.cpu_seq_lens", False, f"{_TRITON}:TritonAttnBackend"),
            Line("server.eager_without_waits", False, f"{_TRITON}:update_sliding_window_buffer"),
            _MHA_POOL,
            _SERVER,
            Line("server.takes_none_kv", True, f"{_TRITON}:TritonAttnBackend.forward_extend"),
            # Lists of keys have seq_lens entries, in a row of the request table.
            Line("server.context_len", {"all", "prefix"}, f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices"),
        ),
    ),
    # A draft worker's other backend. Its plan takes a prefix of one key at least, as every draft of a server has.
    "triton_draft": BridgeCapabilities(
        "triton",
        (
            Line("eager", {DD}, f"{_TRITON}:TritonMultiStepDraftBackend.init_forward_metadata"),
            Line("graph", {DD}, f"{_TRITON}:TritonMultiStepDraftBackend.init_forward_metadata_out_graph"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_DECODE_KERNEL}:decode_attention_fwd"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_DECODE_KERNEL}:decode_attention_fwd"),
            Line("heads.head_dims", {64, 128, 256}, f"{_DECODE_KERNEL}:_decode_grouped_att_m_fwd"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_TRITON}:TritonMultiStepDraftBackend.common_template"),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_DECODE_KERNEL}:_decode_grouped_att_m_fwd"),
            Line("bounds.max_draft_branches", 4, f"{_TRITON}:TritonMultiStepDraftBackend.common_template"),
            Line("server.drafts_without_prefix", False, f"{_TRITON}:TritonMultiStepDraftBackend.common_template"),
            Line("options.logit_cap", True, f"{_TRITON}:logit_capping_mod"),
            Line("options.sinks", True, f"{_TRITON}:TritonAttnBackend.forward_decode"),
            Line("needs.cpu_seq_lens", False, f"{_TRITON}:TritonMultiStepDraftBackend"),
            Line("server.eager_without_waits", False, f"{_TRITON}:update_sliding_window_buffer"),
            _MHA_POOL,
            _SERVER,
        ),
    ),
    "triton_mla": BridgeCapabilities(
        "triton",
        (
            Line("eager", {D, V, V1, V2, X}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_TRITON}:TritonAttnBackend._apply_cuda_graph_metadata"),
            Line("heads.families", {"mla"}, f"{_POOLS}:MLATokenToKVPool"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_EXTEND_KERNEL}:extend_attention_fwd"),
            Line("heads.head_dims", {512}, f"{_EXTEND_KERNEL}:_get_block_sizes_for_extend_attention"),
            Line("heads.mla_rope_dims", {64}, f"{_EXTEND_KERNEL}:_get_block_sizes_for_extend_attention"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices"),
            Line("heads.gqa_ratios", {4, 16}, f"{_DECODE_KERNEL}:_decode_grouped_att_m_fwd"),
            Line("bounds.max_q_rows", 16, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("bounds.max_topk", 4, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("needs.cpu_seq_lens", False, f"{_TRITON}:TritonAttnBackend"),
            Line("server.eager_without_waits", False, f"{_TRITON}:update_sliding_window_buffer"),
            _MLA_POOL,
            _SERVER,
        ),
    ),
    "flashinfer": BridgeCapabilities(
        "flashinfer",
        (
            Line("eager", {D, V, V1, V2, X}, f"{_FLASHINFER}:FlashInferAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_FLASHINFER}:FlashInferAttnBackend._prepare_cuda_graph_metadata"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_FLASHINFER}:should_use_tensor_core"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASHINFER}:FlashInferIndicesUpdaterDecode.__init__"),
            Line("heads.head_dims", {64, 128}, f"{_FLASHINFER}:FlashInferIndicesUpdaterDecode.__init__"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_FLASHINFER}:FlashInferIndicesUpdaterDecode.call_begin_forward"),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_FLASHINFER}:should_use_tensor_core"),
            Line("bounds.max_q_rows", 16, f"{_FLASHINFER}:FlashInferIndicesUpdaterPrefill.call_begin_forward"),
            Line("bounds.max_topk", 4, f"{_FLASHINFER}:FlashInferIndicesUpdaterPrefill.call_begin_forward"),
            # Not in verify, whose mask is laid out for the whole prefix (sglang #39287), and no soft cap, which the
            # plan does not have (sglang #33915).
            Line("windows.modes", {D}, f"{_FLASHINFER}:FlashInferIndicesUpdaterDecode.update_sliding_window"),
            Line("windows.layers", "one", f"{_FLASHINFER}:FlashInferAttnBackend.__init__"),
            _WINDOW_OF_ONE,
            _MHA_POOL,
            _SERVER,
            Line("requires", _FLASHINFER_PACKAGE, f"{_FLASHINFER}:FlashInferAttnBackend.__init__"),
        ),
        fakes="wrappers",
        reads_back=False,
    ),
    "flashinfer_mla": BridgeCapabilities(
        "flashinfer",
        (
            Line("eager", {D, V}, f"{_FLASHINFER_MLA}:FlashInferMLAAttnBackend.init_forward_metadata"),
            Line("graph", {D, V}, f"{_FLASHINFER_MLA}:FlashInferMLAAttnBackend.init_cuda_graph_state"),
            Line("heads.families", {"mla"}, f"{_POOLS}:MLATokenToKVPool"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASHINFER_MLA}:FlashInferMLAIndicesUpdaterDecode.__init__"),
            Line("heads.head_dims", {512}, f"{_FLASHINFER_MLA}:FlashInferMLAIndicesUpdaterDecode.__init__"),
            Line("heads.mla_rope_dims", {64}, f"{_FLASHINFER_MLA}:FlashInferMLAIndicesUpdaterDecode.__init__"),
            Line(
                "kv_pool.page_sizes",
                {1, 16, 64},
                f"{_FLASHINFER_MLA}:FlashInferMLAIndicesUpdaterDecode.call_begin_forward",
            ),
            Line("heads.gqa_ratios", {4, 16}, f"{_FLASHINFER_MLA}:FlashInferMLAIndicesUpdaterDecode.__init__"),
            Line("bounds.max_q_rows", 16, f"{_FLASHINFER_MLA}:FlashInferMLAIndicesUpdaterPrefill.call_begin_forward"),
            Line("bounds.max_topk", 1, f"{_FLASHINFER_MLA}:FlashInferMLAAttnBackend.__init__"),
            _MLA_POOL,
            _SERVER,
            Line("requires", _FLASHINFER_PACKAGE, f"{_FLASHINFER_MLA}:FlashInferMLAAttnBackend.__init__"),
        ),
        fakes="wrappers",
        one_scale=True,  # FlashInferMLAIndicesUpdaterDecode.call_begin_forward
        rope_apart=True,
    ),
    "trtllm_mha": BridgeCapabilities(
        "trtllm_mha",
        (
            Line("eager", {D, V, V2}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.init_cuda_graph_state"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.forward_decode"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.forward_decode"),
            Line("heads.head_dims", {64, 128}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.__init__"),
            Line("kv_pool.page_sizes", {16, 64}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.__init__"),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.forward_decode"),
            Line("bounds.max_q_rows", 16, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.forward_extend"),
            Line("bounds.max_topk", 1, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.forward_extend"),
            Line("options.sinks", True, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.forward_decode"),
            Line("needs.cpu_seq_lens", False, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend"),
            _MHA_POOL,
            _SERVER,
            Line("requires", _FLASHINFER_PACKAGE, f"{_TRTLLM_MHA}:TRTLLMHAAttnBackend.__init__"),
        ),
        fakes="xqa",
    ),
    "trtllm_mla": BridgeCapabilities(
        "trtllm_mla",
        (
            Line("eager", {D, V, V2}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.init_cuda_graph_state"),
            Line("precision.dtypes", {"bf16"}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.forward_decode"),
            Line("heads.gqa_ratios", {16, 128}, f"{_TRTLLM_MLA}:TRTLLMMLABackend.forward_decode"),
            *_OF_TRTLLM_MLA,
        ),
        rope_apart=True,
    ),
    "cutedsl_mla": BridgeCapabilities(
        "cutedsl_mla",
        (
            Line("eager", {D, V, V2}, f"{_CUTEDSL}:CuteDslMLABackend"),
            Line("graph", {D, V, V2}, f"{_CUTEDSL}:CuteDslMLABackend"),
            Line("precision.dtypes", {"bf16"}, f"{_CUTEDSL}:CuteDslMLABackend"),
            Line("heads.gqa_ratios", {16, 128}, f"{_CUTEDSL}:CuteDslMLABackend"),
            *_OF_TRTLLM_MLA,
        ),
        rope_apart=True,
    ),
    # Its indices are positions, which ``transform_index`` maps to slots. A draft is not declared: its table of slots
    # ends with the keys before it.
    "dsa": BridgeCapabilities(
        "dsa",
        (
            Line("eager", {D, V, V2, X}, f"{_DSA}:DeepseekSparseAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_DSA}:DeepseekSparseAttnBackend._apply_cuda_graph_metadata"),
            Line("bounds.max_q_rows", 8, f"{_DSA}:DeepseekSparseAttnBackend._build_forward_metadata_cuda_graph"),
            Line("bounds.max_topk", 1, f"{_DSA}:DeepseekSparseAttnBackend.forward_extend"),
            Line(
                "sparse",
                Sparse(topk=_DSA_TOPK),
                "../kernels/ops/attention/dsa/transform_index.py:transform_index_page_table_decode",
            ),
            *_OF_DSA,
        ),
        fakes="dsa",
        rope_apart=True,
        options={**_DSA_OPTIONS, "dsa_topk_backend": "torch"},
        environment={**_DSA_ENVIRONMENT, "SGLANG_DSA_FUSE_TOPK": "0"},
    ),
    # The indexer gives slots.
    "dsa_fused": BridgeCapabilities(
        "dsa",
        (
            Line("eager", {D, V, V2, X, DD}, f"{_DSA}:DeepseekSparseAttnMultiStepBackend.init_forward_metadata"),
            Line("graph", {D, V, V2, DD}, f"{_DSA}:DeepseekSparseAttnMultiStepBackend.init_forward_metadata_out_graph"),
            Line("bounds.max_q_rows", 8, f"{_DSA}:DeepseekSparseAttnBackend._build_forward_metadata_cuda_graph"),
            Line("bounds.max_topk", 1, f"{_DSA}:DeepseekSparseAttnBackend.forward_extend"),
            Line(
                "sparse",
                Sparse(topk=_DSA_TOPK, index_space="slots"),
                f"{_DSA}:DeepseekSparseAttnBackend._get_fused_topk_page_table",
            ),
            *_OF_DSA,
        ),
        fakes="dsa",
        rope_apart=True,
        options={**_DSA_OPTIONS, "dsa_topk_backend": "flashinfer"},
        environment={**_DSA_ENVIRONMENT, "SGLANG_DSA_FUSE_TOPK": "1"},
    ),
    "fa3": BridgeCapabilities(
        "fa3",
        (
            *_OF_FLASH,
            _FLASH_3,
        ),
    ),
    "fa3_mla": BridgeCapabilities(
        "fa3",
        (
            *_STEPS_OF_FLASH,
            Line("heads.families", {"mla"}, f"{_POOLS}:MLATokenToKVPool"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
            Line("heads.head_dims", {512}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
            Line("heads.mla_rope_dims", {64}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_FLASH}:FlashAttentionBackend.__init__"),
            Line("heads.gqa_ratios", {16, 128}, f"{_FLASH}:FlashAttentionBackend.forward_decode"),
            # Not trees, whose second pass takes slots for pages: docs/evidence/findings/sglang-fa3-mla-trees.md.
            Line("bounds.max_topk", 1, f"{_FLASH}:FlashAttentionBackend.forward_extend"),
            # A launch for several rows loads whole pages if they have 64 slots, as a tile has.
            Line("needs.finite_page_tails", {"same"}, f"{_FLASH}:FlashAttentionBackend.forward_extend"),
            _MLA_POOL,
            _SERVER,
            _FLASH_3,
        ),
    ),
    "fa3_draft": BridgeCapabilities(
        "fa3",
        (
            Line("eager", {DD}, f"{_FLASH}:FlashAttentionMultiStepBackend.init_forward_metadata"),
            Line("graph", {DD}, f"{_FLASH}:FlashAttentionMultiStepBackend.init_forward_metadata_out_graph"),
            *_HEADS_OF_FLASH,
            Line("bounds.max_draft_branches", 4, f"{_FLASH}:FlashAttentionMultiStepBackend.__init__"),
            Line("needs.cpu_seq_lens", False, f"{_FLASH}:FlashAttentionMultiStepBackend"),
            _FLASH_3,
        ),
    ),
    # The same class over the kernels of FlashAttention 4, of which SGLang has a copy.
    "fa4": BridgeCapabilities(
        "fa4",
        (
            *_OF_FLASH,
            Line(
                "requires",
                Requires(sm=(90, 103), packages=("sglang-kernel>=0.4.6", "nvidia-cutlass-dsl>=4.6.2")),
                "layers/attention/attention_registry.py:create_flashattention_v4_backend",
            ),
        ),
    ),
    **OF_STATES,
}

_MOONCAKE = "disaggregation/mooncake/conn.py:MooncakeKVManager"


def _receiving(name: str, page: int, slices: str, *, shared_heads: bool = False) -> BridgeCapabilities:
    """Capabilities of a decode server, which begins no request and receives all of them.

    ``page``: slots of a page, here and at the sender, because SGLang refuses peers with other pages. ``slices``: the
    method for a sender with another number of ranks.
    """
    receives = Receives(page_sizes={page}, ranks=set(SENDER_RANKS), shared_heads=shared_heads)
    lines = {line.capability: line for line in _ALONE[name].lines} | {
        "receives": Line("receives", receives, f"{_MOONCAKE}.{slices}"),
        "eager": Line("eager", {D, X}, f"{_MOONCAKE}.transfer_worker"),
        "graph": Line("graph", set(), f"{_MOONCAKE}.transfer_worker"),
        "kv_pool.page_sizes": Line(
            "kv_pool.page_sizes", {page}, "disaggregation/common/conn.py:CommonKVManager.try_ensure_parallel_info"
        ),
    }
    return replace(_ALONE[name], lines=tuple(lines.values()))


def _offloading(name: str, host: str) -> BridgeCapabilities:
    """Capabilities with ``--enable-hierarchical-cache --hicache-io-backend direct``. ``host``: SGLang's host pool.

    Pages are small: of a prompt within one page nothing would move.
    """
    offloads = Offloads(host_layouts={"layer_first", "page_first_direct"}, by_layer=True)
    lines = {line.capability: line for line in _ALONE[name].lines} | {
        "offloads": Line("offloads", offloads, f"mem_cache/pool_host/{host}.load_to_device_per_layer"),
        "kv_pool.page_sizes": Line("kv_pool.page_sizes", {1, 16}, f"mem_cache/pool_host/{host}.init_kv_buffer"),
        # Only a prefill loads pages back, and none of a graph.
        "eager": Line("eager", {D, X}, "managers/cache_controller.py:HiCacheController.start_loading"),
        "graph": Line("graph", set(), "managers/cache_controller.py:HiCacheController.start_loading"),
        "requires": Line(
            "requires", Requires(compilers=_COMPILED), f"mem_cache/pool_host/{host}.backup_from_device_all_layer"
        ),
    }
    return replace(_ALONE[name], lines=tuple(lines.values()), fakes="hicache")


CAPABILITIES: Mapping[str, BridgeCapabilities] = {
    **_ALONE,
    "torch_native_pd": _receiving("torch_native", 16, "send_kvcache_slice", shared_heads=True),
    "triton_mla_pd": _receiving("triton_mla", 64, "send_kvcache"),
    "gdn_hybrid_pd": _receiving("gdn_hybrid", 16, "_send_mamba_state_slice"),
    "mamba2_hybrid_pd": _receiving("mamba2_hybrid", 16, "_send_mamba_state_slice"),
    "torch_native_hicache": _offloading("torch_native", "mha.py:MHATokenToKVPoolHost"),
    "triton_mla_hicache": _offloading("triton_mla", "mla.py:MLATokenToKVPoolHost"),
}
"""Name after ``sglang:`` -> declared capabilities."""

CAPABILITIES_OF_OLDER: Mapping[str, BridgeCapabilities] = {
    "triton": BridgeCapabilities(
        "triton",
        (
            Line("eager", {D, V, V1, V2}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V1, V2}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata_replay_cuda_graph"),
            Line("heads.families", {"mha", "gqa", "mqa"}, f"{_TRITON}:TritonAttnBackend.__init__"),
            Line("precision.dtypes", {"fp16", "bf16"}, f"{_TRITON}:TritonAttnBackend.__init__"),
            Line("heads.head_dims", {64, 128}, f"{_TRITON}:TritonAttnBackend.__init__"),
            Line("kv_pool.page_sizes", {1, 16, 64}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata"),
            Line("heads.gqa_ratios", {2, 4, 8}, f"{_TRITON}:TritonAttnBackend.__init__"),
            Line("bounds.max_q_rows", 16, f"{_TRITON}:TritonAttnBackend.init_cuda_graph_state"),
            Line("bounds.max_topk", 4, f"{_TRITON}:TritonAttnBackend.init_cuda_graph_state"),
            Line("options.logit_cap", True, f"{_TRITON}:logit_capping_mod"),
            Line("options.sinks", True, f"{_TRITON}:TritonAttnBackend.forward_decode"),
            # Its graph runners leave the width at -1 in draft-extends.
            Line(
                "server.takes_unset_width",
                True,
                f"{_TRITON}:TritonAttnBackend.init_forward_metadata_capture_cuda_graph",
            ),
            Line("kv_pool.kv_layouts", {"custom"}, f"{_POOLS}:MHATokenToKVPool._create_buffers"),
        ),
    ),
}
"""Capabilities in 0.5.12.post1, with places in it."""

OF_SGLANG = (
    "aiter", "ascend", "dsv4", "flashmla", "flex_attention", "hpc_ops", "intel_amx", "intel_xpu",
    "llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer", "nsa", "qsa", "wave",
)  # fmt: skip
"""The other names of SGLang's registry: for hardware or models that the kit does not have."""

OLDER_NAMES = {"tokenspeed_mla": "which SGLang has renamed: sglang:cutedsl_mla"}
"""Old name -> text of the error."""
