"""A race between the programs of a launch fails a backend, though its numbers are right in the emulation."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from in_process import check_backend

from attn_testkit.results.case_result import Status

CASES = ["decode-gqa2x2-d64-bf16-p16-k5.40.17-shuffled-gauss-b3prod"]


def test_splits_that_are_merged_by_a_ticket_pass_and_by_place_are_a_race() -> None:
    right = check_backend("split_merge:ByTicket", device="cpu", modes=["decode"], cases=CASES)
    assert {row.status for row in right} == {Status.PASSED}
    wrong = check_backend("split_merge:ByPlace", device="cpu", modes=["decode"], cases=CASES)
    assert [row.status for row in wrong] == [Status.FAILED] * 2
    # In graphs the last program runs first: it merges, and the others store what it has read.
    accesses = {"eager": "load", "graph": "store"}
    for row in wrong:
        (headline,) = {finding.headline for finding in row.findings}
        assert f"RaceError: a {accesses[row.execution]} of triton kernel attend_and_merge" in headline
        assert "of parts, float32" in str(row.findings)
