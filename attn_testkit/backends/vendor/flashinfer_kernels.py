"""Entry points of FlashInfer's wrappers that adapters call, and the names of their fakes."""

from __future__ import annotations

from .provider import EntryPoint

_FAKES = "flashinfer_fake"
_SM80_AND_UP = ((80, 129),)
BATCH_DECODE = EntryPoint(
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper", _SM80_AND_UP, f"{_FAKES}:make_paged_wrapper", "flashinfer"
)
BATCH_PREFILL = EntryPoint(
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper", _SM80_AND_UP, f"{_FAKES}:make_paged_wrapper", "flashinfer"
)
BATCH_RAGGED = EntryPoint(
    "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper",
    _SM80_AND_UP,
    f"{_FAKES}:make_ragged_wrapper",
    "flashinfer",
)
_MLA = "flashinfer.mla:BatchMLAPagedAttentionWrapper"
BATCH_MLA_FA2 = EntryPoint(_MLA, _SM80_AND_UP, f"{_FAKES}:make_mla_wrapper", "flashinfer")
BATCH_MLA_FA3 = EntryPoint(_MLA, ((90, 90),), f"{_FAKES}:make_mla_wrapper", "flashinfer")
MERGE_STATE = EntryPoint("flashinfer.cascade:merge_state", _SM80_AND_UP, f"{_FAKES}:make_merge_state", "flashinfer")
