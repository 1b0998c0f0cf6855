"""Rows with a scale and a zero: wrong stores and readers are caught and named, and right ones pass."""

from __future__ import annotations

import re

import pytest
from in_process import check_backend

from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.results.case_result import Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit_corpus.faults.catalogue import entry_of
from attn_testkit_corpus.faults.g_zeros import ZerosBackend

CASE = "decode-gqa4x2-d64-bf16-p16-k37.9.0-shuffled-{}-kv{}zerospertokenhead-b4prod"


@pytest.mark.parametrize("backend", [ZerosBackend, TorchNativeFormatsBackend])
@pytest.mark.parametrize("numbers", ["int8", "int4"])
def test_right_stores_and_readers_pass_with_data_of_either_sign_and_of_one(backend: type, numbers: str) -> None:
    cases = [CASE.format(data, numbers) for data in ("gauss", "shifted", "plus_minus_one", "one_hot")]
    found = check_backend(backend, device="cpu", cases=cases, modes=["decode"], executions=["eager"])
    assert [result.status for result in found if result.case] == [Status.PASSED] * len(cases)


@pytest.mark.parametrize(
    ("slug", "data", "numbers"),
    [
        ("range-with-masked-lanes", "shifted", "int8"),
        ("zeros-left-out", "gauss", "int8"),
        ("zeros-as-integers", "shifted", "int4"),
        ("scale-and-zero-of-another-head", "shifted", "int4"),
        ("halves-of-a-row-as-adjacent-numbers", "gauss", "int4"),
    ],
)
def test_a_wrong_zero_is_caught_by_its_check_and_named(slug: str, data: str, numbers: str) -> None:
    fault = entry_of(slug)
    case = CASE.format(data, numbers)
    (result,) = check_backend(fault.backend, device="cpu", cases=[case], modes=["decode"], executions=["eager"])
    assert result.status is Status.FAILED
    assert result.findings[0].check in fault.checks
    assert re.search(fault.hint, format_failure(result)), format_failure(result)
