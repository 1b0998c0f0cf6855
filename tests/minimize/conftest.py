"""Commands that judge in the test's own process."""

from __future__ import annotations

import pytest
from judge_here import Call

from attn_testkit.cli import main


@pytest.fixture
def call(evaluated_here: None, capfd: pytest.CaptureFixture[str]) -> Call:
    """``minimize`` on the CPU: its exit code, stdout and stderr."""

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(["minimize", "--device", "cpu", *argv])
        return code, *capfd.readouterr()

    return _call
