"""What each of SGLang's backends is said to be able to do, and the place in SGLang 0.5.23 that says so.

A claim is tried and what is not claimed is not: a line that is too wide shows as a failure of SGLang's that is none,
a line that is too narrow hides one. So each line names a file under ``sglang/srt`` and a function in it; a test holds
that they are there. What SGLang means to do and does wrong is claimed here, and stands in docs/findings.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_testkit.contract import Capabilities, ForwardMode

__all__ = ["CLAIMS", "OF_SGLANG", "Claims", "Line"]

D, V, V1, V2, X, DD = (
    ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2,
    ForwardMode.EXTEND, ForwardMode.DRAFT_DECODE,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One claim."""

    claim: str
    """A field of ``Capabilities``."""
    value: Any
    place: str
    """``file:Class.function`` under ``sglang/srt``, where the claim can be read."""


@dataclass(frozen=True)
class Claims:
    """Everything about one name."""

    registered: str
    """The name in SGLang's registry, ``ATTENTION_BACKENDS``."""
    lines: tuple[Line, ...]
    rope_apart: bool = False
    """MLA: SGLang's model gives q and k without their rope columns, and those beside them."""

    @property
    def capabilities(self) -> Capabilities:
        """The same as one object."""
        return Capabilities(**{line.claim: line.value for line in self.lines})


_TRITON = "layers/attention/triton_backend.py"
_EXTEND_KERNEL = "../kernels/ops/attention/extend_attention.py"
_DECODE_KERNEL = "../kernels/ops/attention/decode_attention.py"
_NATIVE = "layers/attention/torch_native_backend.py"
_POOLS = "mem_cache/memory_pool.py"

_COMMON = (
    Line("kv_layouts", {"own"}, f"{_POOLS}:MHATokenToKVPool._create_buffers_normal"),
    Line("takes_none_kv", True, f"{_TRITON}:TritonAttnBackend.forward_extend"),
)

CLAIMS: Mapping[str, Claims] = {
    "torch_native": Claims(
        "torch_native",
        (
            # Verify would want seq_lens with the new tokens; graphs have no hook.
            Line("eager", {D, V1, V2, X}, f"{_NATIVE}:TorchNativeAttnBackend.forward_extend"),
            Line("families", {"mha", "gqa", "mqa"}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_decode"),
            Line("dtypes", {"fp16", "bf16", "fp32"}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("head_dims", {64, 128}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("page_sizes", {1, 16, 64}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("gqa_ratios", {2, 4, 8}, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("max_q_rows", 16, f"{_NATIVE}:TorchNativeAttnBackend._run_sdpa_forward_extend"),
            Line("sliding_window", {D, V1, V2, X}, f"{_NATIVE}:TorchNativeAttnBackend._make_sliding_window_mask"),
            Line("layer_windows", "one", "model_executor/model_runner.py:ModelRunner"),
            Line("min_window", 1, "layers/radix_attention.py:RadixAttention.__init__"),
            Line("kv_layouts", {"own"}, f"{_POOLS}:MHATokenToKVPool._create_buffers_normal"),
        ),
    ),
    "triton": Claims(
        "triton",
        (
            Line("eager", {D, V, V1, V2, X, DD}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2, DD}, f"{_TRITON}:TritonAttnBackend._apply_cuda_graph_metadata"),
            Line("families", {"mha", "gqa", "mqa"}, f"{_DECODE_KERNEL}:decode_attention_fwd"),
            Line("dtypes", {"fp16", "bf16"}, f"{_EXTEND_KERNEL}:extend_attention_fwd"),
            Line("head_dims", {64, 128, 256}, f"{_EXTEND_KERNEL}:_get_block_sizes_for_extend_attention"),
            Line("page_sizes", {1, 16, 64}, f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices"),
            Line("gqa_ratios", {2, 4, 8}, f"{_DECODE_KERNEL}:_decode_grouped_att_m_fwd"),
            Line("max_q_rows", 16, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("max_topk", 4, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("max_draft_branches", 4, f"{_TRITON}:TritonMultiStepDraftBackend.common_template"),
            Line("sliding_window", {D, V, V1, V2, X, DD}, f"{_TRITON}:update_sliding_window_buffer"),
            Line("layer_windows", "one", f"{_TRITON}:TritonAttnBackend.__init__"),
            Line("min_window", 1, "layers/radix_attention.py:RadixAttention.__init__"),
            Line("logit_cap", True, f"{_TRITON}:logit_capping_mod"),
            Line("sinks", True, f"{_TRITON}:TritonAttnBackend.forward_decode"),
            Line("needs_cpu_seq_lens", False, f"{_TRITON}:TritonAttnBackend"),
            *_COMMON,
        ),
    ),
    "triton_mla": Claims(
        "triton",
        (
            Line("eager", {D, V, V1, V2, X}, f"{_TRITON}:TritonAttnBackend.init_forward_metadata"),
            Line("graph", {D, V, V2}, f"{_TRITON}:TritonAttnBackend._apply_cuda_graph_metadata"),
            Line("families", {"mla"}, f"{_POOLS}:MLATokenToKVPool"),
            Line("dtypes", {"fp16", "bf16"}, f"{_EXTEND_KERNEL}:extend_attention_fwd"),
            Line("head_dims", {512}, f"{_EXTEND_KERNEL}:_get_block_sizes_for_extend_attention"),
            Line("mla_rope_dims", {64}, f"{_EXTEND_KERNEL}:_get_block_sizes_for_extend_attention"),
            Line("page_sizes", {1, 16, 64}, f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices"),
            Line("gqa_ratios", {4, 16}, f"{_DECODE_KERNEL}:_decode_grouped_att_m_fwd"),
            Line("max_q_rows", 16, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("max_topk", 4, f"{_TRITON}:TritonAttnBackend._update_target_verify_buffers"),
            Line("needs_cpu_seq_lens", False, f"{_TRITON}:TritonAttnBackend"),
            Line("kv_layouts", {"own"}, f"{_POOLS}:MLATokenToKVPool._create_buffers"),
        ),
    ),
}
"""Name behind ``sglang:`` -> what is claimed."""

OF_SGLANG = (
    "aiter", "ascend", "dsa", "dsv4", "fa4", "flashmla", "flex_attention", "hpc_ops", "intel_amx", "intel_xpu",
    "llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer", "nsa", "qsa", "wave",
)  # fmt: skip
"""The other names of SGLang's registry: for hardware or models that the kit does not have."""
