"""The adapters of TensorRT-LLM kernels on fakes: conformant, and their historic mistakes are caught."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("flashinfer", reason="the flashinfer extra is not installed")

from in_process import assert_passes_on_fakes, texts_of_failure

XQA = "attn_testkit.backends.trtllm_mha:XQABackend"
needs_tokenspeed = pytest.mark.skipif(
    importlib.util.find_spec("tokenspeed_mla") is None or importlib.util.find_spec("cutlass") is None,
    reason="the tokenspeed extra is not installed",
)

DECODE = "decode-gqa4x2-d64-bf16-p16-k15.16.17-shuffled-gauss-b5prod"
WINDOW = "decode-mha2-d64-fp16-p16-k40.3-reversed-one_hot-w4-sink-b2prod"
FP8 = "decode-gqa8x2-d128-bf16-p64-k15.70-interleaved-gauss-kvfp8e4m3-b4stale"
VERIFY = "target-verify-gqa4x2-d64-bf16-p16-k15.33-chain4-shuffled-one_hot-b4nan"
VERIFY_WINDOW = "target-verify-mqa4-d64-fp16-p16-k7.20-chain5-contiguous-gauss-w4-sink-b3prod"
V1 = "draft-extend-gqa4x2-d64-bf16-p16-k31.32.33-n4a1.3.2-shuffled-one_hot-b4nan"
V2 = "draft-extend-v2-mha2-d64-fp16-p16-k1.2.5-n4a1.3.2-reversed-shifted-b6stale"
V1_FP8 = "draft-extend-gqa4x2-d128-fp16-p16-k20.3-n3a1.3-shuffled-one_hot-kvfp8e4m3-w4-b3prod"
V2_FP8 = "draft-extend-v2-gqa4x2-d128-fp16-p16-k20.3-n3a1.3-shuffled-one_hot-kvfp8e4m3-w4-b3prod"
DRAFT = "draft-decode-gqa4x2-d64-bf16-p16-k15.33.16-topk3steps4-shuffled-gauss-w20-b5nan"
FOR_XQA = (DECODE, WINDOW, FP8, VERIFY, VERIFY_WINDOW, V2, V2_FP8, DRAFT)
HEALTHY = (*FOR_XQA, V1, V1_FP8)

MLA_DECODE = "decode-mla16-d512r64-bf16-p32-k31.32.5-shuffled-gauss-b5stale"
MLA_FP8 = "decode-mla16-d512r64-bf16-p64-k63.9-reversed-one_hot-kvfp8e4m3-b3prod"
MLA_VERIFY = "target-verify-mla16-d512r64-bf16-p32-k30.5-chain4-shuffled-gauss-b3nan"
MLA_V1 = "draft-extend-mla16-d512r64-bf16-p32-k30.3.9-n4a1.3.2-interleaved-gauss-b4prod"
MLA_V1_EVEN = "draft-extend-mla16-d512r64-bf16-p32-k5.9-n4a1.3-shuffled-gauss-b2prod"
MLA_V2 = "draft-extend-v2-mla16-d512r64-bf16-p64-k1.2-n3a1.3-shuffled-gauss-kvfp8e4m3-b4prod"
MLA_DRAFT = "draft-decode-mla16-d512r64-bf16-p32-k31.3-topk3steps4-shuffled-gauss-kvfp8e4m3-b4prod"
MLA_HEALTHY = (MLA_DECODE, MLA_FP8, MLA_VERIFY, MLA_V1, MLA_V1_EVEN, MLA_V2, MLA_DRAFT)

SPARSE_DECODE = "decode-mla16-d512r64-bf16-p32-k100.5-shuffled-gauss-sel16slotsempty-b4prod"
SPARSE_VERIFY = "target-verify-mla16-d512r64-bf16-p64-k60.33-chain7-shuffled-gauss-kvfp8e4m3-sel16slots-b3nan"
SPARSE_V1 = "draft-extend-mla16-d512r64-bf16-p32-k30.3.40-n4a1.3.2-interleaved-gauss-sel16slots-b4prod"
SPARSE_V2 = "draft-extend-v2-mla16-d512r64-bf16-p64-k70.2-n3a1.3-shuffled-one_hot-sel64slotsempty-b4stale"
SPARSE_DRAFT = "draft-decode-mla16-d512r64-bf16-p32-k31.3-topk3steps4-shuffled-gauss-sel16slots-b4prod"
SPARSE_HEALTHY = (SPARSE_DECODE, SPARSE_VERIFY, SPARSE_V1, SPARSE_V2, SPARSE_DRAFT)

TS_DECODE = MLA_FP8
TS_VERIFY = "target-verify-mla16-d512r64-bf16-p64-k15.70-chain3-shuffled-gauss-kvfp8e4m3-b3prod"
TS_V1 = "draft-extend-mla16-d512r64-bf16-p32-k30.3-n4a1.3-reversed-gauss-kvfp8e4m3-b3nan"
TS_MIXED = "decode-mla16-d512r64-bf16-p64-k300-shuffled-gauss-kvfp8e4m3-b2prod-multi_mode"
TS_HEALTHY = (TS_DECODE, TS_VERIFY, TS_V1, MLA_V2, MLA_DRAFT)


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        ("attn_testkit.backends.trtllm_mha:TRTLLMMHABackend", HEALTHY),
        (XQA, FOR_XQA),
        ("attn_testkit.backends.trtllm_mla:TRTLLMMLABackend", MLA_HEALTHY),
        ("attn_testkit.backends.trtllm_mla_sparse:TRTLLMMLASparseBackend", SPARSE_HEALTHY),
        pytest.param("attn_testkit.backends.tokenspeed_mla:TokenspeedMLABackend", TS_HEALTHY, marks=needs_tokenspeed),
    ],
)
def test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated(
    backend: str, cases: tuple[str, ...], execution: str
) -> None:
    assert_passes_on_fakes(backend, execution, cases)


FAULTS = [
    ("LengthsOfThePrefix", "eager", V2, "request 0 has nan in its output"),
    ("PagesOfTheFirstBranch", "eager", DRAFT, "differs from the oracle"),
    ("LengthsOfTheFirstForward", "eager", MLA_DRAFT, "differs from the oracle"),
    ("DraftsNotCounted", "eager", VERIFY, "the last 4 KV tokens are missing"),
    ("OffsetsOfTheCapture", "graph", V1, "eager mode is right"),
    ("StrideOfMinusOne", "graph", VERIFY, "inconsistent with step sign"),
    ("LongestOfTheCapture", "graph", DECODE, "eager mode is right"),
    ("ReadsHostLengths", "eager", DECODE, "no-host-lengths"),
    ("WaitsForLengths", "graph", DECODE, "preparing a replay waits for the device"),
    ("ValueScaleForgotten", "eager", FP8, "right without v_scale"),
    ("WindowOfW", "eager", WINDOW, "the first KV token is missing"),
    ("QueriesOf16Bits", "eager", V1_FP8, "an FP8 cache under bf16 queries"),
    ("MaskNotPassed", "eager", VERIFY, "Mask is required for speculative decoding"),
    ("MaskRowsAreBytes", "eager", VERIFY, "XQA reads 32 bytes of mask"),
    ("WorkspaceNotZeroed", "eager", DECODE, "has nan in its output"),
    ("TableWiderThanItsRows", "eager", DECODE, "request 1 has nan in its output"),
    ("StridedQueries", "eager", DECODE, "differs from the oracle"),
    ("PackedRowsAtReplay", "graph", MLA_V1, "eager mode is right"),
    ("ViewIfDivisible", "eager", MLA_V1_EVEN, "a uniform stride of 2 gets wrong"),
    ("RowsInFront", "eager", MLA_V1, "it read a slot of another owner"),
    ("MLADraftsNotCounted", "eager", MLA_VERIFY, "the last 4 KV tokens are missing"),
    ("TableOfThePrefix", "eager", MLA_VERIFY, "has nan in its output"),
    ("MetadataOfTheCapture", "graph", MLA_DECODE, "eager mode is right"),
    ("CountersAllocatedInCapture", "graph", MLA_DECODE, "it uses memory that was allocated in a capture"),
    ("LatentScaleForgotten", "eager", MLA_FP8, "the result is right without k_scale"),
    ("SelectionOfTheCapture", "graph", SPARSE_DECODE, "eager mode is right"),
    ("LengthsOfTopK", "eager", SPARSE_DECODE, "has nan in its output"),
    ("CountersOfTheRequests", "graph", SPARSE_VERIFY, "counter_buffer is too small"),
]
TOKENSPEED_FAULTS = [
    ("WorkspaceMadeInForward", "graph", TS_MIXED, "the graph uses memory that no longer exists"),
    ("OutputScaleForgotten", "eager", TS_DECODE, "look at FP8 scales"),
    ("QueriesNotRounded", "eager", TS_DECODE, "must match query dtype"),
]


@pytest.mark.parametrize(
    ("fault", "execution", "case", "message"),
    [*FAULTS, *(pytest.param(*fault, marks=needs_tokenspeed) for fault in TOKENSPEED_FAULTS)],
)
def test_a_historic_mistake_is_caught(fault: str, execution: str, case: str, message: str) -> None:
    texts = texts_of_failure(f"faulty_trtllm:{fault}", message, device="cpu", executions=[execution], cases=[case])
    assert any(message in text for text in texts), texts
