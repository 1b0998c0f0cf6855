"""Fuzzing on the fake judge of the front ends, and on the judge of ``minimize`` that is in the test's own process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "front_ends"))
sys.path.insert(0, str(Path(__file__).parents[1] / "minimize"))

from judge_here import JudgeHere

from attn_testkit.running import judge_process


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "RUNNER", "fake_runner")


@pytest.fixture
def judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_testkit.cli.one_by_one.JudgeProcess", JudgeHere)
