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

from attn_testkit.bridges.sglang.versions import CURRENT, supported


def _missing() -> str:
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed: ci/servers.sh"
    return "" if supported() == CURRENT else f"SGLang {CURRENT} is not what is installed: ci/servers.sh"


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")

BUGS = {
    "DoubleCount": ("draft-extend-v2", "graph", "replay-follows-batch"),
    "FreshTensor": ("decode", "graph", "addresses-stable"),
    "StaleMask": ("target-verify", "graph", "replay-follows-batch"),
    "NoWindowInDraftExtend": ("draft-extend-v2", "graph", "replay-follows-batch"),
    "PackedOffsets": ("draft-extend-v2", "graph", "replay-follows-batch"),
    "WindowsInDecode": ("decode", "eager", "matches-oracle"),
}


def results_of(tmp_path: Path, backend: str, mode: str, execution: str) -> list[dict[str, Any]]:
    """Of tier smoke, as the command line writes them."""
    record = tmp_path / "record.json"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = ["run", "--backend", backend, "--mode", mode, "--execution", execution, "--device", "cpu"]
    subprocess.run(
        [sys.executable, "-m", "attn_testkit", *command, "--json", str(record)],
        env={**os.environ, "PYTHONPATH": path}, check=False, timeout=600, capture_output=True,
    )  # fmt: skip
    return list(json.loads(record.read_text())["results"])


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_put_back_is_found(tmp_path: Path, bug: str) -> None:
    mode, execution, check = BUGS[bug]
    found = results_of(tmp_path, f"sglang_bugs:{bug}", mode, execution)
    assert check in {finding["check"] for result in found for finding in result["findings"]}


@pytest.mark.parametrize(("mode", "execution"), sorted({(mode, execution) for mode, execution, _ in BUGS.values()}))
def test_without_it_nothing_is_found(tmp_path: Path, mode: str, execution: str) -> None:
    found = [each for each in results_of(tmp_path, "sglang:triton", mode, execution) if each["case"]]
    assert len(found) >= 8
    assert {each["status"] for each in found} == {"passed"}
