"""Capabilities of vLLM's backends whose layers keep a state, and the places in vLLM that document them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attn_testkit.contract import State

from ..capabilities import D, Line, V, X

_GDN = "v1/attention/backends/gdn_attn.py"
_QWEN = "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
_CONV = "model_executor/layers/mamba/ops/causal_conv1d.py"
_MAMBA = "v1/attention/backends/mamba_attn.py"
_MIXER = "model_executor/layers/mamba/mamba_mixer2.py"
_SSU = "model_executor/layers/mamba/ops/mamba_ssm.py"
_LINEAR = "v1/attention/backends/linear_attn.py"
_BAILING = "model_executor/layers/mamba/linear/bailing_linear_attn.py"
_MINIMAX = "model_executor/layers/mamba/linear/minimax_linear_attn.py"
_LIGHTNING = "model_executor/layers/lightning_attn.py"
_SHAPES = "model_executor/layers/mamba/mamba_utils.py"


def _lines(place: str, **values: Any) -> tuple[Line, ...]:
    return tuple(Line(name, value, place) for name, value in values.items())


# Columns of a window after the slots; index 0 is the null block; a request has a slot for each node of a draft.
_STATE = State(
    k_dims={64, 128}, dtypes={"fp32", "bf16"}, conv_widths={4}, padding={"skip_zero"}, fresh={"flag"},
    rollback={"slots"}, strided=True, products="model", conv_products="model",
)  # fmt: skip
# Fresh slots get zeros: layers clear them, except for prompts of one token (docs/evidence/findings.md).
# A state is [head_dim, head_dim].
_LINEAR_STATE = State(
    k_dims={128}, dtypes={"fp32"}, conv_widths={1}, orders={"kv"}, padding={"skip_zero"}, fresh={"zeroed"},
    rollback={"slots"}, strided=True, products="tf32",
)  # fmt: skip
# A padded request of a graph updates the null block.
_MINIMAX_STATE = replace(_LINEAR_STATE, padding=frozenset({"write_zero"}))

LINES_OF_STATES: Mapping[str, tuple[Line, ...]] = {
    # AttentionCGSupport.UNIFORM_BATCH: decodes and verifications.
    "gdn": (
        *_lines(f"{_QWEN}:QwenGatedDeltaNetAttention._forward_core", eager={D, V, X}),
        *_lines(f"{_GDN}:GDNAttentionMetadataBuilder.build_for_cudagraph_capture", graph={D, V}),
        *_lines(
            f"{_QWEN}:QwenGatedDeltaNetAttention",
            **{"heads.families": {"gdn"}},
            **{"heads.head_dims": {64, 128}},
            **{"precision.dtypes": {"bf16"}},
        ),
        *_lines(f"{_QWEN}:QwenGatedDeltaNetAttention.__init__", **{"heads.gqa_ratios": {1, 2, 4}}),
        *_lines(f"{_GDN}:GDNAttentionMetadata", **{"kv_pool.page_sizes": {16}}, **{"bounds.max_q_rows": 6}),
        *_lines(f"{_SHAPES}:MambaStateShapeCalculator.gated_delta_net_state_shape", state=_STATE),
    ),
    "mamba2": (
        *_lines(f"{_MIXER}:MambaMixer2.conv_ssm_forward", eager={D, V, X}),
        *_lines(f"{_MAMBA}:BaseMambaAttentionMetadataBuilder.build_for_cudagraph_capture", graph={D, V}),
        *_lines(
            f"{_MIXER}:MambaMixer2",
            **{"heads.families": {"mamba"}},
            **{"heads.head_dims": {64}},
            **{"precision.dtypes": {"bf16"}},
        ),
        *_lines(f"{_MIXER}:MambaMixer2.__init__", **{"heads.gqa_ratios": {1, 2, 4}}),
        *_lines(f"{_MAMBA}:BaseMambaAttentionMetadata", **{"kv_pool.page_sizes": {16}}, **{"bounds.max_q_rows": 6}),
        *_lines(f"{_SHAPES}:MambaStateShapeCalculator.mamba2_state_shape", state=_STATE),
    ),
    "bailing": (
        *_lines(f"{_BAILING}:BailingMoELinearAttention._forward", eager={D, V, X}),
        *_lines(f"{_LINEAR}:BailingLinearAttentionMetadataBuilder.build_for_cudagraph_capture", graph={D, V}),
        *_lines(
            f"{_BAILING}:BailingMoELinearAttention",
            **{"heads.families": {"lightning"}},
            **{"heads.head_dims": {128}},
            **{"precision.dtypes": {"bf16"}},
        ),
        *_lines(f"{_BAILING}:BailingMoELinearAttention.__init__", **{"heads.gqa_ratios": {1}}),
        *_lines(
            f"{_LINEAR}:BailingLinearAttentionMetadata", **{"kv_pool.page_sizes": {16}}, **{"bounds.max_q_rows": 6}
        ),
        Line("server.eager_without_waits", False, f"{_BAILING}:clear_linear_attention_cache_for_new_sequences"),
        *_lines(f"{_SHAPES}:MambaStateShapeCalculator.linear_attention_state_shape", state=_LINEAR_STATE),
    ),
    # AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, and no drafts.
    "linear": (
        *_lines(f"{_MINIMAX}:MiniMaxText01LinearAttention._forward", eager={D, X}),
        *_lines(f"{_LINEAR}:LinearAttentionMetadataBuilder", graph={D}),
        *_lines(
            f"{_MINIMAX}:MiniMaxText01LinearAttention",
            **{"heads.families": {"lightning"}},
            **{"precision.dtypes": {"bf16"}},
        ),
        *_lines(f"{_LIGHTNING}:linear_decode_forward_triton", **{"heads.head_dims": {128}}),
        *_lines(f"{_MINIMAX}:MiniMaxText01LinearAttention.__init__", **{"heads.gqa_ratios": {1}}),
        *_lines(f"{_LINEAR}:LinearAttentionMetadata", **{"kv_pool.page_sizes": {16}}),
        Line("server.eager_without_waits", False, f"{_MINIMAX}:clear_linear_attention_cache_for_new_sequences"),
        *_lines(f"{_SHAPES}:MambaStateShapeCalculator.linear_attention_state_shape", state=_MINIMAX_STATE),
    ),
}
"""Name after ``vllm:`` -> lines besides those of the model runner."""
