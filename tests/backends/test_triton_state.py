"""``triton_state`` passes in each mode, and bugs that only kernels have are caught."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

from in_process import check_backend

from attn_testkit.cases.case import parse_case
from attn_testkit.results.case_result import CaseResult, Status

DECODE = "decode-gdn2x2-d64-bf16-p16-k3.9-shuffled-mild_decay-k64w4s32-layers1from0-b3prod"
STRIDED = "decode-gdn2x2-d64-bf16-p16-k3.9-shuffled-mild_decay-k64w4s32.strided-layers1from0-b2prod"
TILES = "decode-gdn2x2-d96-bf16-p16-k3.9-shuffled-mild_decay-k64w4s32-layers1from0-b2prod"
VERIFY = "target-verify-gdn2x2-d64-bf16-p16-k5.1-chain3-shuffled-mild_decay-k64w4s32.snap16-layers1from0-b2prod"
EXTEND = "extend-gdn2x2-d64-bf16-p16-k0.17-n5a1.9-shuffled-mild_decay-k64w4s32-layers1from0-b2prod"


def run(name: str, case: str, execution: str) -> CaseResult:
    mode = parse_case(case).mode
    backend = f"faulty_triton_state:{name}"
    (row,) = check_backend(backend, device="cpu", modes=[mode.value], executions=[execution], cases=[case])
    return row


@pytest.mark.parametrize(
    ("case", "execution"), [(DECODE, "graph"), (STRIDED, "eager"), (VERIFY, "eager"), (EXTEND, "eager")]
)
def test_it_passes_in_each_mode(case: str, execution: str) -> None:
    row = run("Healthy", case, execution)
    assert row.status is Status.PASSED, [finding.headline for finding in row.findings]
    assert 0.01 < (row.margin or 0) < 0.6


@pytest.mark.parametrize(
    ("name", "case", "execution", "checks"),
    [
        ("PaddedProgramsWriteSlot0", DECODE, "graph", {"writes-own-state"}),
        ("StridesByTheShape", STRIDED, "eager", {"writes-own-state", "finite", "reads-own-state"}),
        ("LastTileOfValuesUnmasked", TILES, "eager", {"completes"}),
        ("GridOfTheFirstRequest", EXTEND, "eager", {"matches-oracle", "output-written", "state-matches-oracle"}),
        ("FlagOfTheNextRequest", EXTEND, "eager", {"reads-own-state", "finite", "matches-oracle"}),
        ("ScratchBySlot", VERIFY, "eager", {"state-matches-oracle", "conv-window-exact"}),
        (
            "SlotsKeptFromTheCapture",
            DECODE,
            "graph",
            {"replay-follows-batch", "matches-oracle", "finite", "reads-own-state", "writes-own-state"},
        ),
    ],
)
def test_a_bug_of_a_kernel_is_caught(name: str, case: str, execution: str, checks: set[str]) -> None:
    row = run(name, case, execution)
    assert row.status is Status.FAILED
    assert {finding.check for finding in row.findings} & checks, [finding.headline for finding in row.findings]
