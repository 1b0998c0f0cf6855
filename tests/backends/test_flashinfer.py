"""The FlashInfer adapters on the fakes of their kernels: conformant, and their historic mistakes are caught."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("flashinfer", reason="the flashinfer extra is not installed")

from in_process import assert_passes_on_fakes, texts_of_failure

from attn_testkit.backends.flashinfer import FlashInferBackend
from attn_testkit.backends.vendor.warmup import families_of
from attn_testkit.catalogue.tiers import generate
from attn_testkit.steps.data import DTYPES, make_layers

DECODE = "decode-gqa2x2-d64-bf16-p16-k15.16.17-shuffled-gauss-cap1.5-b5prod"
TENSOR_CORES = "decode-gqa4x2-d64-fp16-p16-k15.16.17-reversed-one_hot-w11-b4nan"
FULL_PAGE = "decode-mha2-d64-bf16-p16-k15.31-shuffled-one_hot-b2prod"
WINDOW = "decode-mha2-d64-bf16-p16-k40.3-shuffled-one_hot-w4-b2prod"
FP8 = "decode-gqa2x2-d64-bf16-p16-k15.16.17-shuffled-gauss-kvfp8e4m3-b4stale"
TREE = "target-verify-gqa3x2-d64-fp16-p16-k3.37.9.17-t0.0.1.1.3-interleaved-one_hot-b7stale"
CHAIN = "target-verify-mha2-d64-bf16-p1-k7.20-chain4-contiguous-gauss-w4-b3prod"
V1 = "draft-extend-gqa4x2-d64-bf16-p32-k31.32.33-n4a1.3.2-shuffled-one_hot-b4nan"
V1_WINDOW = "draft-extend-mqa4-d64-bf16-p16-k31.5-n4a1.3-shuffled-one_hot-w4-b3prod"
V2 = "draft-extend-v2-mha2-d64-fp16-p16-k1.2.5-n4a1.3.2-reversed-shifted-cap1.5-b6stale"
DRAFT = "draft-decode-gqa2x2-d64-fp16-p16-k15.33.16-topk3steps4-shuffled-gauss-w20-b5nan"
DRAFT_HND = "draft-decode-mha2-d64-bf16-p16-k1.32-topk2steps3-reversed-one_hot-kvhnd-b3prod"
DRAFT_LOOP = "draft-decode-mqa4-d64-bf16-p32-k33.64.1-topk1steps3-loop6-shuffled-gauss-b4prod"
HEALTHY = (DECODE, TENSOR_CORES, FULL_PAGE, WINDOW, FP8, TREE, CHAIN, V1, V1_WINDOW, V2, DRAFT, DRAFT_HND, DRAFT_LOOP)

MLA_DECODE = "decode-mla16-d512r64-bf16-p32-k31.32.5-shuffled-gauss-b5stale"
MLA_CHAIN = "target-verify-mla16-d128r64-fp16-p16-k3.20-chain4-reversed-one_hot-b3nan"
MLA_V1 = "draft-extend-mla2-d128r64-bf16-p1-k15.16.17-n4a1.3.2-interleaved-gauss-b4prod"
MLA_V2 = "draft-extend-v2-mla16-d128r64-bf16-p16-k1.2-n3a1.3-shuffled-gauss-b4prod"
MLA_CLUSTERS = "draft-extend-mla16-d512r64-bf16-p64-k63.64.65-n6a1x3-contiguous-mean-b4prod"
MLA_DRAFT = "draft-decode-mla16-d128r64-bf16-p32-k31.3-topk3steps4-shuffled-gauss-b4prod"
MLA_ONE_ROW = "extend-mla128-d512r64-bf16-p64-k0-n1a1-contiguous-gauss-b1prod"
"""Half of its heads are a tile where its graph is planned as if it had two requests."""
MLA_HEALTHY = (MLA_CLUSTERS, MLA_ONE_ROW, MLA_DECODE, MLA_CHAIN, MLA_V1, MLA_V2, MLA_DRAFT)
MLA_FP8 = "target-verify-mla16-d512r64-bf16-p64-k15.70-chain3-shuffled-gauss-kvfp8e4m3-b3prod"


@pytest.mark.parametrize(
    ("backend", "execution", "cases"),
    [
        ("flashinfer", "eager", HEALTHY),
        ("flashinfer", "graph", (TENSOR_CORES, FP8, TREE, V1_WINDOW, V2, DRAFT, DRAFT_LOOP)),
        ("flashinfer_mla", "eager", MLA_HEALTHY),
        ("flashinfer_mla", "graph", (MLA_CLUSTERS, MLA_ONE_ROW, MLA_CHAIN, MLA_V1, MLA_DRAFT)),
        ("flashinfer_mla_fa3", "eager", (MLA_CLUSTERS,)),
        ("flashinfer_mla_fa3", "graph", (MLA_CLUSTERS, MLA_CHAIN)),
        ("flashinfer_mla_fp8", "eager", (MLA_FP8,)),
        ("flashinfer_mla_fp8", "graph", (MLA_FP8,)),
    ],
)
def test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated(
    backend: str, execution: str, cases: tuple[str, ...]
) -> None:
    assert_passes_on_fakes(backend, execution, cases)


FAULTS = [
    ("MaskLeftOver", "graph", V1, "differs from the oracle"),
    ("SoftCapForgottenInPlan", "eager", DECODE, "differs from the oracle"),
    ("SoftCapGivenToForward", "eager", DECODE, "right without a soft cap"),
    ("WindowGivenToRun", "eager", V1_WINDOW, "window_left == self._window_left"),
    ("WindowOfW", "eager", WINDOW, "differs from the oracle"),
    ("FillsBuffersWithoutPlanning", "graph", TENSOR_CORES, "of 17 or more are wrong"),
    ("NewWrapperAtReplay", "graph", DECODE, "the graph uses memory that no longer exists"),
    ("OneKindForAllLayers", "eager", DECODE, "differs from the oracle"),
    ("LastPageByRemainder", "eager", FULL_PAGE, "differs from the oracle"),
    ("LengthsOfTheFirstForward", "eager", DRAFT, "differs from the oracle"),
    ("OneBufferForAllForwards", "graph", MLA_DRAFT, "differs from the oracle"),
    ("DraftsNotCounted", "eager", CHAIN, "differs from the oracle"),
    ("ScalesOfFp8Forgotten", "eager", FP8, "differs from the oracle"),
    ("LengthsOfThePrefix", "eager", MLA_V1, "CSR metadata page counts in kv_indptr must equal"),
    ("LengthsOfThePrefix", "eager", MLA_V2, "differs from the oracle"),
    ("RunInPagesOfOneSlot", "eager", MLA_DECODE, "it read a slot of another owner"),
    ("VerifyNotCausal", "eager", MLA_CHAIN, "differs from the oracle"),
    ("ScaleOfTheWidth", "eager", MLA_DECODE, "differs from the oracle"),
    ("MLAPlansAtCaptureOnly", "graph", MLA_DECODE, "differs from the oracle"),
    ("OtherClusterSizeAtReplay", "graph", MLA_CLUSTERS, "output that was never written"),
    ("UniformStrideInV1", "graph", MLA_V1, "query offsets are probably not the running sum of the counts"),
    ("RopeScaleForgotten", "eager", MLA_FP8, "differs from the oracle"),
]


@pytest.mark.parametrize(("fault", "execution", "case", "message"), FAULTS)
def test_a_historic_mistake_is_caught(fault: str, execution: str, case: str, message: str) -> None:
    texts = texts_of_failure(f"faulty_flashinfer:{fault}", message, device="cpu", executions=[execution], cases=[case])
    assert any(message in text for text in texts), texts


def test_the_warmup_compiles_what_every_layer_of_a_core_case_needs() -> None:
    compiled = {family.arguments for family in families_of(["flashinfer"])}
    declared = FlashInferBackend.capabilities
    needed = set()
    for case in itertools.chain.from_iterable(generate(declared, mode, "core") for mode in declared.eager):
        kv_dtype = DTYPES[case.dtype if case.kv_dtype == "same" else case.kv_dtype]
        common = (DTYPES[case.dtype], kv_dtype, DTYPES[case.dtype], torch.int32, case.head_dim, case.head_dim, 0)
        for layer in make_layers(case):
            needed.add(("fa2", *common, layer.sliding_window_size >= 0, layer.logit_cap > 0, False))
    assert needed <= compiled
    assert len({family[8:10] for family in needed}) == 4, "window and soft cap: each alone, both, neither"
