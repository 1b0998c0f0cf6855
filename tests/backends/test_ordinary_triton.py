"""An ordinary Triton kernel is judged as on a GPU: bfloat16 passes with room to spare, a tf32 dot fails."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from in_process import check_backend

from attn_testkit.results.case_result import Status

CASES = [
    "decode-gqa4x2-d64-bf16-p16-k3.9.6-shuffled-gauss-b4prod",
    "decode-mha2-d64-bf16-p16-k40.70-shuffled-gauss-b2prod",
    "decode-gqa2x2-d64-bf16-p16-k0.9.70-shuffled-negative-b4prod",
]


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_it_passes_well_within_the_limits(execution: str) -> None:
    rows = check_backend(
        "ordinary_triton:FlashDecode", device="cpu", modes=["decode"], executions=[execution], cases=CASES
    )
    assert {row.case: [f.headline for f in row.findings] for row in rows} == {case: [] for case in CASES}
    assert {row.status for row in rows} == {Status.PASSED}
    assert 0.1 < max(row.margin or 0 for row in rows) < 0.6


FLOAT32 = "decode-gqa2x2-d64-fp32-p16-k300.70.12-interleaved-shifted-b3prod"


@pytest.mark.parametrize(("name", "right"), [("FlashDecodeOfFloat32", False), ("FlashDecodeOfFloat32InFull", True)])
def test_float32_needs_a_dot_of_float32(name: str, right: bool) -> None:
    (row,) = check_backend(
        f"ordinary_triton:{name}", device="cpu", modes=["decode"], executions=["eager"], cases=[FLOAT32]
    )
    assert row.status is (Status.PASSED if right else Status.FAILED)
    assert [finding.check for finding in row.findings] == ([] if right else ["matches-oracle"])
