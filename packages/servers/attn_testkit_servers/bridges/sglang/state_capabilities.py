"""Capabilities of SGLang's classes whose layers keep a state, with the places in SGLang that document them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attn_testkit.contract import SGLANG, Requires, State

from ..capabilities import D, Line, V, X
from .bridge_capabilities import BridgeCapabilities

_TRITON = "layers/attention/triton_backend.py"
_HYBRID = "layers/attention/hybrid_linear_attn_backend.py"
_GDN = "layers/attention/linear/gdn_backend.py"
_GDN_KERNELS = "layers/attention/linear/kernels/gdn_triton.py"
_FLASHINFER = "layers/attention/linear/kernels/gdn_flashinfer.py:FlashInferGDNKernel"
_SERVER = Line("server", SGLANG, "layers/radix_attention.py:RadixAttention.forward")

_OF_GDN = (
    Line("eager", {D, V, X}, f"{_GDN}:GDNAttnBackend.forward_extend"),
    Line("graph", {D, V}, f"{_HYBRID}:MambaAttnBackendBase._replay_metadata"),
    Line("heads.families", {"gdn"}, f"{_GDN}:GDNAttnBackend"),
    Line("precision.dtypes", {"bf16"}, "configs/mamba_utils.py:mamba2_state_dtype"),
    Line("heads.head_dims", {64, 128}, f"{_GDN_KERNELS}:TritonGDNKernel.extend"),
    Line("heads.gqa_ratios", {1, 2, 4}, f"{_GDN_KERNELS}:TritonGDNKernel.packed_decode"),
    Line("kv_pool.page_sizes", {16}, f"{_TRITON}:TritonAttnBackend._fill_kv_indptr_and_indices"),
    Line("bounds.max_q_rows", 6, f"{_GDN_KERNELS}:TritonGDNKernel.target_verify"),
    Line("bounds.max_topk", 3, f"{_HYBRID}:MambaAttnBackendBase._forward_metadata"),
    Line("needs.cpu_seq_lens", False, f"{_GDN}:GDNAttnBackend"),
    _SERVER,
    Line("server.eager_without_waits", False, "../kernels/ops/attention/fla/index.py:prepare_chunk_indices"),
)
_KDA = "layers/attention/linear/kda_backend.py"
_KDA_KERNELS = "layers/attention/linear/kernels/kda_triton.py"
_OF_KDA = {
    "eager": Line("eager", {D, V, X}, f"{_KDA}:KDAAttnBackend.forward_extend"),
    "heads.families": Line("heads.families", {"kda"}, f"{_KDA}:KDAAttnBackend"),
    "heads.gqa_ratios": Line("heads.gqa_ratios", {1}, "configs/kimi_linear.py:KimiLinearConfig.mamba2_cache_params"),
    "heads.head_dims": Line("heads.head_dims", {64}, f"{_KDA_KERNELS}:TritonKDAKernel.extend"),
    "bounds.max_q_rows": Line("bounds.max_q_rows", 6, f"{_KDA_KERNELS}:TritonKDAKernel.target_verify"),
    "bounds.max_topk": Line("bounds.max_topk", 3, f"{_HYBRID}:MambaAttnBackendBase._forward_metadata"),
    "needs.cpu_seq_lens": Line("needs.cpu_seq_lens", False, f"{_KDA}:KDAAttnBackend"),
}
_CUTE_DSL = Requires(sm=(90, 90), packages=("flashinfer-python>=0.7.2,<0.8",), compilers=("nvidia-cutlass-dsl>=4.6.2",))
_OF_GDN_FLASHINFER = {
    "heads.head_dims": Line("heads.head_dims", {128}, f"{_FLASHINFER}.decode"),
    "bounds.max_topk": Line("bounds.max_topk", 1, f"{_FLASHINFER}.target_verify"),
}
_MIXER = "layers/attention/mamba/mamba.py"
_OF_MAMBA2 = {
    "eager": Line("eager", {D, V, X}, f"{_MIXER}:MambaMixer2.forward"),
    "heads.families": Line("heads.families", {"mamba"}, f"{_HYBRID}:Mamba2AttnBackend"),
    "heads.gqa_ratios": Line("heads.gqa_ratios", {1, 2, 4}, f"{_MIXER}:MambaMixer2.forward"),
    "heads.head_dims": Line("heads.head_dims", {64}, f"{_MIXER}:MambaMixer2.forward"),
    "bounds.max_q_rows": Line("bounds.max_q_rows", 6, f"{_MIXER}:MambaMixer2.forward"),
    "bounds.max_topk": Line("bounds.max_topk", 1, f"{_MIXER}:MambaMixer2.forward"),
    "needs.cpu_seq_lens": Line("needs.cpu_seq_lens", False, f"{_HYBRID}:Mamba2AttnBackend"),
}
_LIGHTNING = "layers/attention/linear/lightning_backend.py"
_SEG_LA = "../kernels/ops/attention/linear/seg_la.py:seg_la_fwd"
_OF_LIGHTNING = {
    "eager": Line("eager", {D, V, X}, f"{_LIGHTNING}:LightningAttentionBackend.forward_extend"),
    "heads.families": Line("heads.families", {"lightning"}, f"{_LIGHTNING}:LightningAttentionBackend"),
    "heads.gqa_ratios": Line("heads.gqa_ratios", {1}, _SEG_LA),
    # A decode takes 128 columns of a key at once, and none of a shorter key.
    "heads.head_dims": Line("heads.head_dims", {128}, _SEG_LA),
    "bounds.max_q_rows": Line("bounds.max_q_rows", 6, _SEG_LA),
    "bounds.max_topk": Line("bounds.max_topk", 1, f"{_LIGHTNING}:LightningAttentionBackend.__init__"),
    "needs.cpu_seq_lens": Line("needs.cpu_seq_lens", False, f"{_LIGHTNING}:LightningAttentionBackend"),
}
_GDN_STATE = State(
    k_dims={64, 128}, dtypes={"fp32", "bf16"}, conv_widths={4}, fresh={"zeroed"}, products="model",
    conv_products="model", trees={"gdn"},
)  # fmt: skip
_GDN_FLASHINFER_STATE = replace(_GDN_STATE, k_dims=frozenset({128}), dtypes=frozenset({"fp32"}), trees=frozenset())
_KDA_STATE = replace(
    _GDN_STATE, k_dims=frozenset({64}), dtypes=frozenset({"fp32"}), plain_convolution=False, trees=frozenset({"kda"})
)

_MAMBA_STATE = replace(_GDN_STATE, k_dims=frozenset({64, 128}), fresh=frozenset({"flag"}), trees=frozenset())
_LIGHTNING_STATE = State(
    k_dims={128}, dtypes={"fp32"}, conv_widths={1}, orders={"kv"}, fresh={"zeroed"}, products="tf32"
)

_ALONE: Mapping[str, BridgeCapabilities] = {
    "gdn": BridgeCapabilities(
        "triton",
        (*_OF_GDN, Line("state", _GDN_STATE, "configs/qwen3_next.py:Qwen3NextConfig.mamba2_cache_params")),
        keeps_states=True,
    ),
    # --linear-attn-backend flashinfer, as on SM90: states in fp32.
    "gdn_flashinfer": BridgeCapabilities(
        "triton",
        (
            *(_OF_GDN_FLASHINFER.get(line.capability, line) for line in _OF_GDN),
            Line("state", _GDN_FLASHINFER_STATE, f"{_FLASHINFER}.extend"),
            Line("requires", _CUTE_DSL, f"{_FLASHINFER}.__init__"),
        ),
        fakes="gdn",
        options={"linear_attn_backend": "flashinfer"},
        keeps_states=True,
    ),
    "kda": BridgeCapabilities(
        "triton",
        (
            *(_OF_KDA.get(line.capability, line) for line in _OF_GDN),
            Line("state", _KDA_STATE, f"{_KDA}:KDAAttnBackend._convolve_prefill"),
        ),
        keeps_states=True,
    ),
    "mamba2": BridgeCapabilities(
        "triton",
        (
            *(_OF_MAMBA2.get(line.capability, line) for line in _OF_GDN),
            Line("state", _MAMBA_STATE, "configs/nemotron_h.py:NemotronHConfig.mamba2_cache_params"),
        ),
        keeps_states=True,
    ),
    "lightning": BridgeCapabilities(
        "triton",
        (
            *(_OF_LIGHTNING.get(line.capability, line) for line in _OF_GDN),
            Line("state", _LIGHTNING_STATE, "configs/bailing_hybrid.py:BailingHybridConfig.mamba2_cache_params"),
        ),
        keeps_states=True,
    ),
}


def _hybrid(alone: BridgeCapabilities) -> BridgeCapabilities:
    """Capabilities with softmax layers between, as every model of SGLang has."""
    lines = {line.capability: line for line in alone.lines}
    state = Line("state", replace(lines["state"].value, hybrid=True), f"{_HYBRID}:HybridLinearAttnBackend.forward")
    return replace(alone, lines=tuple((lines | {"state": state}).values()))


OF_STATES: Mapping[str, BridgeCapabilities] = {
    **_ALONE,
    **{f"{name}_hybrid": _hybrid(_ALONE[name]) for name in ("gdn", "kda", "mamba2", "lightning")},
}
"""Name after ``sglang:`` -> declared capabilities."""
