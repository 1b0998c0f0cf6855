"""What a worker of the test's Ray cluster does first: it takes the fake of the judge, which needs no torch."""

from __future__ import annotations

from attn_testkit.running.processes import judge_process


def use_fake() -> None:
    judge_process.RUNNER = "fake_runner"
