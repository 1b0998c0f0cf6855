"""A green smoke run names its tier, since five bugs that are made by accident are green in smoke and red in core."""

from __future__ import annotations

import accidental_bugs
import pytest
from in_process import check_backend, plan_run

FOUND_BY = {
    "Fp16Accumulator": "decode-mha2-d64-bf16-p16-k70.20-reversed-beyond_fp16-b2prod",
    "NarrowPageOffsets": "decode-mha2-d64-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool",
    "ShortContext": "decode-gqa2x2-d64-bf16-p16-k1500.70-reversed-gauss-b3prod",
    "OneRemainder": "decode-mha2-d64-bf16-p16-k71.72.73.74.75.76.77.78.79.80.81.82.83.84.85.86.87.88.89.90.91."
    "92.93.94.95-shuffled-gauss-b27prod",
    "RaisesInAGroup": "decode-gqa4x2-d64-bf16-p16-k21.3-shuffled-gauss-b2prod",
}
"""Name of a backend -> a case of core that shows its bug."""


@pytest.mark.parametrize("name", FOUND_BY)
def test_smoke_is_green_and_says_that_it_was_smoke(name: str) -> None:
    results = check_backend(getattr(accidental_bugs, name), device="cpu", diagnose="none")
    assert results.verdict.startswith(
        "CONFORMANT (smoke): 9 of 9 planned case-runs passed; not tried: group 4, 8; more than"
    )
    assert str(results).count('tier="core"') == 1


def test_core_has_the_cases_that_find_them() -> None:
    core = plan_run(backends=[accidental_bugs.Decode], device="cpu", tier="core")
    assert {*FOUND_BY.values()} <= {item.case for item in core.items}


@pytest.mark.parametrize(("name", "case"), FOUND_BY.items())
def test_that_case_finds_it_and_passes_without_the_bug(name: str, case: str) -> None:
    more = {"device": "cpu", "cases": [case], "diagnose": "none"}
    assert check_backend(getattr(accidental_bugs, name), **more).verdict.startswith("NOT CONFORMANT: 1 failed of 1 ")
    assert check_backend(accidental_bugs.Decode, **more).verdict.startswith("PARTIAL: ")
