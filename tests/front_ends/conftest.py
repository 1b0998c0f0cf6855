"""The doors are tested on a stand-in engine, so that every way a case-run can end is at hand and torch is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import attn_testkit

sys.path.insert(0, str(Path(__file__).parent))

import fake_engine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """Put the stand-in where the doors look for the engine."""
    monkeypatch.setitem(sys.modules, "attn_testkit.running.plan", fake_engine)
    monkeypatch.setattr(attn_testkit, "engine", fake_engine, raising=False)
    return fake_engine
