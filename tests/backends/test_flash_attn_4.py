"""The adapter of FlashAttention 4 on its fake: conformant, and mistakes in its calls are caught."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("flash_attn") is None:
    pytest.skip("the flash-attn-4 extra is not installed", allow_module_level=True)

from in_process import assert_passes_on_fakes, texts_of_failure

DECODE = "decode-gqa4x2-d64-bf16-p16-k15.16.17-shuffled-gauss-w4-sink-lsewhole-b5prod"
CAPPED = "decode-mha2-d128-fp16-p64-k63.64.65-reversed-peaked-cap1.5-b4nan"
VERIFY = "target-verify-mqa4-d64-bf16-p16-k15.33-chain4-shuffled-one_hot-b4nan"
V1 = "draft-extend-gqa4x2-d64-bf16-p16-k31.32.33-n4a1.3.2-shuffled-one_hot-b4nan"
V2 = "draft-extend-v2-mha2-d64-fp16-p16-k1.2.5-n4a1.3.2-reversed-shifted-b6stale"
EXTEND = "extend-gqa4x2-d64r64-bf16-p16-k7x2-n5a3.5-shuffled-gauss-b2prod"
BOTH_SIDES = "extend-gqa4x2-d64-bf16-p16-k20.9-n12a12.7-shuffled-gauss-w4-b2prod-noncausal-bothsides"
DRAFT = "draft-decode-gqa4x2-d64-bf16-p16-k15.33.16-topk3steps4-shuffled-gauss-w20-b5nan"
HEALTHY = (DECODE, CAPPED, VERIFY, V1, V2, EXTEND, BOTH_SIDES, DRAFT)


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_every_kind_of_case_passes_and_says_that_its_kernels_are_emulated(execution: str) -> None:
    assert_passes_on_fakes("flash_attn_4", execution, HEALTHY)


@pytest.mark.parametrize(
    ("fault", "execution", "case"),
    [
        ("WindowCountsTheRow", "eager", DECODE),
        ("OneSidedWindow", "eager", BOTH_SIDES),
        ("NoSoftCap", "eager", CAPPED),
        ("SinkOfTheFirstLayer", "eager", DECODE),
        ("LengthsOfTheCapture", "graph", VERIFY),
    ],
)
def test_a_mistake_in_a_call_is_caught(fault: str, execution: str, case: str) -> None:
    message = "differs from the oracle"
    texts = texts_of_failure(
        f"faulty_flash_attn_4:{fault}", message, device="cpu", executions=[execution], cases=[case]
    )
    assert any(message in text for text in texts), texts
