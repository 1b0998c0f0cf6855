"""Hand-overs and offloading by SGLang's own code: bugs that are put back are found, and cases pass without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_sglang_bugs import pytestmark as pytestmark
from test_sglang_bugs import results_of

BUGS = {
    "HeadsInTurn": (
        "torch_native_pd",
        "received-as-sent",
        "decode-mqa4-d64-fp16-p16-k35.16.31.1-shuffled-gauss-kvcustom-handed1to4k2p16nhd-b5prod",
    ),
    "OneSlice": (
        "gdn_hybrid_pd",
        "received-as-sent",
        "decode-gdn4x2-d64-bf16-p16-k5-shuffled-like_keys-k64w4sb16.zeroed-layers3from5hybrid-handed2to4p16nhd-b2nan",
    ),
    "NoFence": (
        "torch_native_hicache",
        "completes",
        "extend-gqa2x2-d128-fp16-p1-k3.21.5.17-n5a7.8.2.1-chunks3-interleaved-shifted-kvcustom-offloadpagefirstdirect-b5stale",
    ),
    "NoWait": (
        "torch_native_hicache",
        "completes",
        "decode-mqa4-d64-fp32-p16-k600.70.12-interleaved-peaked-kvcustom-offloadlayerfirst-b4nan",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_put_back_is_found_and_without_it_its_case_passes(tmp_path: Path, bug: str) -> None:
    name, check, case = BUGS[bug]
    failed = results_of(tmp_path, "--backend", f"sglang_transfer_bugs:{bug}", "--case", case)
    assert [each["status"] for each in failed] == ["failed"]
    assert check in {finding["check"] for finding in failed[0]["findings"]}
    without = results_of(tmp_path, "--backend", f"sglang:{name}", "--case", case)
    assert [each["status"] for each in without] == ["passed"]


def test_breakable_graphs_of_sglang_are_captured_and_replayed_in_the_emulation() -> None:
    script = Path(__file__).parent / "proof_sglang_breakable.py"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", script], check=False, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.splitlines()[-1].startswith("right:"), ran.stderr
