"""Front ends are tested on a fake judge, so that every way a case-run can end is at hand and torch is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attn_testkit.running.processes import judge_process

sys.path.insert(0, str(Path(__file__).parent))

import fake_runner


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """Put the fake where the front ends look for what judges."""
    monkeypatch.setattr(judge_process, "RUNNER", "fake_runner")
    return fake_runner
