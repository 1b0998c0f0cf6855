"""After a wrong result the kit says what was attended to, where other weight went, and what that looks like."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from in_process import check_backend

from attn_testkit.results.case_result import CaseResult, Status

DECODE = "decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-b4prod"
SOFT_CAP = "decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-cap1.5-b4prod"
REVERSED = "draft-extend-v2-gqa3x2-d32-fp16-p4-k3.9-n4a1.3-reversed-gauss-b2prod"
SHORT_FIRST = "decode-gqa3x2-d64-bf16-p4-k0.9.70-shuffled-gauss-b4prod"
NEGATIVE = "decode-gqa3x2-d64-bf16-p4-k0.9.70-shuffled-negative-b4prod"
HERE = "attn_testkit_corpus.faults."

TEXTS = [
    (
        "d_kv_extent:LengthRoundedUpToPage",
        DECODE,
        "reads-own-kv",
        # Of which head, and so how much, hangs on the rounding of the CPU: several are wrong alike.
        "% of its weight went to slots after its last key",
    ),
    ("d_kv_extent:PageIdUsedAsSlot", DECODE, "reads-own-kv", "100% of its weight went to unowned pages"),
    ("d_kv_extent:DecodeMissesItsOwnKey", DECODE, "matches-oracle", "the last KV token is missing"),
    ("d_kv_extent:NonMonotonicSlots", REVERSED, "matches-oracle", "mixed up with each other"),
    ("g_scales_and_sinks:SoftCapAfterMask", SOFT_CAP, "matches-oracle", "the soft cap probably comes after the mask"),
    ("h_empty_and_splits:EmptySplitsNotWritten", SHORT_FIRST, "finite", "memory that was never written"),
    ("h_empty_and_splits:CombineWithoutMaximum", NEGATIVE, "finite", "near -6e4"),
    ("h_empty_and_splits:ZeroTimesNan", SHORT_FIRST, "reads-own-kv", "0 * NaN is NaN"),
    ("i_addressing:LocationsReadAsInt32", DECODE, "writes-own-kv", "was not written"),
]


def of_cases(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Without the rows of modes that are not declared."""
    return [result for result in results if result.case]


@pytest.mark.parametrize(("name", "case", "check", "text"), TEXTS, ids=[text[0] for text in TEXTS])
def test_the_failure_says_where_the_weight_went(name: str, case: str, check: str, text: str) -> None:
    (result,) = of_cases(check_backend(HERE + name, device="cpu", executions=["eager"], cases=[case]))
    assert result.status is Status.FAILED
    assert text in " ".join(f"{f.attended} {f.hint}" for f in result.findings if f.check == check)


def test_an_output_that_nobody_wrote_is_not_called_nan() -> None:
    spec = HERE + "h_empty_and_splits:EarlyExitWithoutWriting"
    for result in of_cases(check_backend(spec, device="cpu", cases=[SHORT_FIRST])):
        assert result.findings[0].check == "output-written", result.findings[0].headline


def test_wrong_writes_are_reported_before_the_numbers_that_follow_from_them() -> None:
    spec = HERE + "i_addressing:LocationsReadAsInt32"
    (result,) = of_cases(check_backend(spec, device="cpu", executions=["eager"], cases=[DECODE]))
    assert result.findings[0].check == "writes-own-kv"


def test_what_another_mode_left_behind_is_reported_as_such() -> None:
    case = "target-verify-gqa2x2-d64-fp16-p1-k13-t0.0.1-interleaved-one_hot-b2prod-multi_mode"
    spec = HERE + "l_wrappers:LeftoverFallbackFlag"
    (result,) = of_cases(check_backend(spec, device="cpu", executions=["graph"], cases=[case]))
    assert [f.check for f in result.findings] == ["buckets-independent"]
    assert "no other mode" in result.findings[0].hint
