"""What a failure says points at the bug, and does not say what cannot be known."""

from __future__ import annotations

import warnings

import pytest
from in_process import check_backend

from attn_testkit.checks.describe import times
from attn_testkit.environment import resolve
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.results.finding import Finding

HERE = "confused_backends:"
GAUSS = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
MEAN = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-mean-b4prod"
CLIFF = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-rising_logits-b4prod"
PACKED = "draft-extend-gqa2x2-d64-bf16-p16-k9.40-n6a2.4-shuffled-gauss-b2prod"
WIDE = "draft-extend-gqa2x2-d64-bf16-p16-k9.40-n33a33.3-shuffled-gauss-b2prod"
LONG = "decode-gqa2x2-d64-bf16-p16-k300.70.12-shuffled-gauss-b3prod"
LONGEST = "decode-gqa2x2-d64-bf16-p16-k4096-shuffled-one_hot-b1prod"


def finding_of(name: str, case: str) -> Finding:
    """The first finding of the first step, eager."""
    (result,) = check_backend(HERE + name, device="cpu", executions=["eager"], cases=[case])
    assert result.status is Status.FAILED
    return result.findings[0]


TEXTS = [
    ("ResultsInAnotherOrder", GAUSS, "request 0 holds the result of request 2", "page or slot"),
    ("ResultsInAnotherOrder", MEAN, "request 0 holds the result of request 2", "page or slot"),
    ("OffsetsAtAUniformStride", PACKED, "a uniform stride of 3 gets wrong", "missing"),
    ("OffsetsAtAUniformStride", PACKED, "request 1 was computed with KV tokens 0..10 of request 0", "shifted"),
    ("ReadsNoKV", GAUSS, "the output is all zeros, in every layer", "seq_lens of this mode"),
    ("CapacityOf256", LONG, "KV tokens from 256 on are missing: a fixed capacity", "seq_lens of this mode"),
    ("CapacityOf2048", LONGEST, "KV tokens from 2048 on are missing: a fixed capacity of 2048", "in the middle"),
    ("LastKeyLostInSomeHeads", GAUSS, "only heads 0, 2 of 4 attended to the wrong KV tokens", "seq_lens of this mode"),
    ("SecondTileOfRows", WIDE, "rows from 16 on are wrong", "seq_lens of this mode"),
    ("PaddedHeadDim", GAUSS, "only dims from 32 on are wrong", "missing"),
    ("RoundsWeights", GAUSS, "precision", "scale"),
    ("NeverRescales", GAUSS, "when a later tile of keys has a larger maximum", "missing"),
    ("NeverRescales", CLIFF, "climb and fall by hundreds", "missing"),
]


@pytest.mark.parametrize(("name", "case", "text", "never"), TEXTS, ids=[f"{i}-{t[0]}" for i, t in enumerate(TEXTS)])
def test_the_hint_points_at_the_bug_and_at_nothing_else(name: str, case: str, text: str, never: str) -> None:
    finding = finding_of(name, case)
    assert text in finding.hint, finding
    assert never not in finding.hint


def test_what_is_attended_is_said_of_the_request_in_the_headline() -> None:
    finding = finding_of("ReadsNoKV", GAUSS)
    request = " ".join(finding.headline.split()[:2])
    assert finding.attended.startswith(f"{request} attended to no KV token, expected 0.."), finding


def test_nan_from_k_and_v_that_are_stored_already_is_not_called_something_kept() -> None:
    strides = "attn_testkit_corpus.faults.i_addressing:QueryStrideIgnored"
    case = "decode-gqa2x2-d32-bf16-p1-k7x2-shared-negative-w0-b2prod-s3"
    results = check_backend(strides, device="cpu", executions=["eager"], cases=[case])
    (finding,) = (finding for result in results for finding in result.findings)
    assert finding.step == (
        "another eager step on the instance (lengths of the first step, other requests, save_kv_cache=False)"
    )
    assert finding.check == "finite"
    assert "with save_kv_cache=False k and v hold NaN, and they are read" in finding.hint
    assert "kept" not in finding.hint


def test_of_thousands_of_kv_tokens_all_are_asked_about_at_once() -> None:
    finding = finding_of("CapacityOf2048", LONGEST)
    assert finding.attended == "request 0 attended to KV tokens 0..2047, expected 0..4096"


def test_the_spread_names_rows_heads_and_dims_that_are_a_part_of_all() -> None:
    assert "(17 of 33 rows: 16-32)" in finding_of("SecondTileOfRows", WIDE).spread
    assert "only heads 0, 2 of 4 in every wrong row" in finding_of("LastKeyLostInSomeHeads", GAUSS).spread
    assert "only dims 32-63 of 64" in finding_of("PaddedHeadDim", GAUSS).spread
    assert "only" not in finding_of("ReadsNoKV", GAUSS).spread


def test_two_wrong_requests_of_which_the_longest_is_right_are_no_stride() -> None:
    assert "a stride is probably wrong" not in finding_of("CapacityOf256", LONG).hint


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0001, "just"), (1.02, "1.02x"), (3.44, "3.4x"), (56.2, "56x"), (2e6, "over a million times")]
)
def test_a_ratio_near_one_is_not_rounded_to_one(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_results_print_failures_and_counts() -> None:
    results = check_backend(HERE + "RoundsWeights", device="cpu", executions=["eager"], cases=[GAUSS])
    lines = str(results).splitlines()
    assert lines[0].startswith(f"{GAUSS}: request ")
    assert lines[-1] == "NOT CONFORMANT: 1 failed of 1 selected case-runs (52 planned)"
    assert "--device cpu" in str(results)


def test_numpy_remarks_on_nan_inside_triton_are_not_printed_as_the_backends_words() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        resolve("cpu").prepare_process()
        for module in ("triton.runtime.interpreter", "my_pkg.attn"):
            warnings.warn_explicit("All-NaN slice encountered", RuntimeWarning, module, 1, module=module)
    assert [each.filename for each in seen] == ["my_pkg.attn"]


def test_a_hint_that_only_restates_the_check_is_printed_last() -> None:
    vague, telling = "only the graph is wrong: probably a value", "the last KV token is missing"
    finding = Finding("replay-follows-batch", "request 0 differs", hint=f"{vague}\n{telling}\nin this case x")
    text = format_failure(CaseResult("b", "decode", "graph", "c", Status.FAILED, findings=(finding,)))
    assert text.index(telling) < text.index("in this case x") < text.index(vague)
