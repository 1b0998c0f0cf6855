"""The doctor on the fake judge of the front ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "front_ends"))

from attn_testkit.running.processes import judge_process


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "RUNNER", "fake_runner")
