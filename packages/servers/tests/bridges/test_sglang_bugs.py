"""Bugs put back into SGLang's own class are found by the command that finds none in it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_testkit_servers.bridges.sglang.versions import CURRENT, supported


def _missing() -> str:
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed: ci/servers.sh"
    return "" if supported() == CURRENT else f"SGLang {CURRENT} is not what is installed: ci/servers.sh"


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")

BUGS = {
    "DoubleCount": ("sglang_bugs", "draft-extend-v2", "graph", "replay-follows-batch"),
    "PackedOffsets": ("sglang_bugs", "draft-extend-v2", "graph", "replay-follows-batch"),
    "NoWindowInDraftExtend": ("sglang_bugs", "draft-extend-v2", "graph", "replay-follows-batch"),
    "FreshTensor": ("sglang_bugs", "decode", "graph", "addresses-stable"),
    "StaleMask": ("sglang_bugs", "target-verify", "graph", "replay-follows-batch"),
    "HeadsOfServerRanks": ("sglang_bugs", "decode", "eager", "completes"),
    "WindowsInDecode": ("sglang_bugs", "decode", "eager", "matches-oracle"),
    "FP8": ("sglang_bugs", "target-verify", "eager", "completes"),
    "SoftCap": ("sglang_wider", "decode", "eager", "matches-oracle"),
    "WindowsInVerify": ("sglang_wider", "target-verify", "eager", "matches-oracle"),
    "SharedKV": ("sglang_wider", "extend", "eager", "finite"),
    "StaleSlots": ("sglang_state_bugs", "decode", "graph", "writes-own-state"),
    "PaddingClamped": ("sglang_state_bugs", "decode", "graph", "writes-own-state"),
    "TrackedPrefixes": ("sglang_state_bugs", "extend", "eager", "matches-oracle"),
    "NothingCommitted": ("sglang_state_bugs", "target-verify", "eager", "state-matches-oracle"),
    "WindowNotRolledBack": ("sglang_state_bugs", "target-verify", "eager", "conv-window-exact"),
    "ScratchBySlot": ("sglang_state_bugs", "target-verify", "eager", "state-matches-oracle"),
}
SHIPPED = ("WindowsInDecode", "FP8", "SoftCap", "WindowsInVerify", "SharedKV")
"""They are in 0.5.23: there is nothing without them."""


def results_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Of tier smoke, as the command line writes them; those of case-runs."""
    record = tmp_path / "record.json"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "attn_testkit", "run", "--device", "cpu", *options, "--json", str(record)],
        env={**os.environ, "PYTHONPATH": path}, check=False, timeout=600, capture_output=True,
    )  # fmt: skip
    return [each for each in json.loads(record.read_text())["results"] if each["case"]]


@pytest.mark.parametrize(
    ("proof", "said"),
    [
        ("kda", "WRONG: what a token wrote"),
        ("mamba2_windows", "WRONG: a window is cut as one part"),
        ("unused_scales", "WRONG: the output is multiplied by a scale that the pool was not divided by"),
    ],
)
def test_a_proof_says_without_a_check_of_the_kit_what_is_wrong(proof: str, said: str) -> None:
    script = Path(__file__).parent / f"proof_sglang_{proof}.py"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", script], env={**os.environ, "TRITON_INTERPRET": "1"}, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].startswith(said)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_put_back_is_found_and_without_it_its_case_passes(tmp_path: Path, bug: str) -> None:
    module, mode, execution, check = BUGS[bug]
    which = ("--mode", mode, "--execution", execution)
    failed = results_of(tmp_path, "--backend", f"{module}:{bug}", *which, "-x")[-1]
    assert failed["status"] == "failed"
    assert check in {finding["check"] for finding in failed["findings"]}
    if bug in SHIPPED:
        return
    healthy = "sglang:gdn" if module == "sglang_state_bugs" else "sglang:triton"
    without = results_of(tmp_path, "--backend", healthy, *which, "--case", failed["case"])
    assert [each["status"] for each in without] == ["passed"]
