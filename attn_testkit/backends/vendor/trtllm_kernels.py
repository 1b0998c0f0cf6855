"""FlashInfer's ``trtllm_*`` entry points, and the names of their fakes."""

from __future__ import annotations

from .provider import EntryPoint

_FAKES = "trtllm_fake"
_DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
_GEN_SM = ((100, 107),)
DECODE_XQA = EntryPoint(_DECODE, ((90, 90), (120, 121)), f"{_FAKES}:make_xqa_decode", "flashinfer")
"""Decode as the package dispatches it on SM90 and SM120."""
DECODE_GEN = EntryPoint(_DECODE, _GEN_SM, f"{_FAKES}:make_gen_decode", "flashinfer")
"""Decode as the package dispatches it on SM100."""
CONTEXT = EntryPoint(
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache", _GEN_SM, f"{_FAKES}:make_gen_context", "flashinfer"
)
DECODE_MLA = EntryPoint(
    "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla", _GEN_SM, f"{_FAKES}:make_gen_mla", "flashinfer"
)

SEMAPHORE_BYTES = 8 << 20
"""XQA: bytes at the front of the workspace that must be zero at every launch."""
