"""ci/start_up.py: it sees a run come to its first result. Nothing is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.mark.slow
def test_the_marks_of_a_run_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CI))
    import start_up

    found = start_up.once(start_up.HERE, ["-b", "torch_native", "--device", "cpu", "--mode", "decode"])
    assert tuple(found) == start_up.MARKS
    assert list(found.values()) == sorted(found.values())
    sys.modules.pop("start_up")
