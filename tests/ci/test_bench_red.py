"""ci/bench_red.py: one small mistake in an adapter is one cause, on one screen, and is diagnosed once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from bench_red import ADAPTERS, MISTAKES, measure

from attn_testkit.reports.record import read_report

SCREEN = 40
MOST_DIAGNOSED = 3
"""The first failure, one that is plainer, and one that shows only in a graph. The first case of decode in smoke has a
server variant, so that a plainer one follows. A wait of the host is a failure of an eager forward and, in a case whose
capture comes first, of the capture: these are two checks."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter-last-key", "the last KV token is missing"),
        ("adapter-host-maximum", "waits for the device"),
    ],
)
def test_a_small_mistake_is_one_cause_on_one_screen(name: str, said: str, tmp_path: Path) -> None:
    got = measure(name, folder=tmp_path, options=["--mode=decode"])
    assert got.failures > 5
    assert len(got.causes) == 1, got.causes
    assert said in got.stdout
    assert got.lines <= SCREEN, got.stdout
    assert "start here: attn-testkit repro" in got.stdout
    assert 1 <= sum(result.diagnosed for result in read_report(tmp_path / "results.json").results) <= MOST_DIAGNOSED


def test_an_adapter_without_a_mistake_passes_and_names_no_cause(tmp_path: Path) -> None:
    got = measure("adapter", folder=tmp_path, options=["--mode=decode"])
    assert (got.failures, got.causes) == (0, ())
    assert "start here" not in got.stdout
    assert re.search(r"^PARTIAL: .*all passed", got.stdout, re.MULTILINE), got.stdout


def test_every_mistake_is_an_edit_of_its_adapter() -> None:
    for mistake in MISTAKES:
        adapter = ADAPTERS[mistake.adapter]
        file = mistake.file or f"{adapter.spec.partition(':')[0]}.py"
        assert adapter.files()[file].count(mistake.old) == 1, mistake.name
