"""What a run says while it runs, where its errors are no terminal."""

from __future__ import annotations

from dataclasses import replace

import fake_runner
import pytest

from attn_testkit.cli import show
from attn_testkit.results.case_result import CaseResult, Status


@pytest.mark.parametrize(
    ("status", "done"),
    [
        (Status.PASSED, "1 of 2 case-runs"),
        (Status.KNOWN_FAILURE, "1 of 2 case-runs"),
        (Status.FAILED, "1 of 2 case-runs, 1 did not pass"),
        (Status.UNSUPPORTED, "0 of 2 case-runs"),
        (Status.NOT_RUN_HERE, "0 of 2 case-runs"),
        (Status.QUARANTINED, "0 of 2 case-runs"),
    ],
)
def test_what_is_known_without_running_is_no_progress(
    status: Status, done: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "LOG_SECONDS", -1)
    plan = fake_runner.plan_run(backends=["fake:ok"])
    result: CaseResult = replace(fake_runner.run_item(plan.items[0]), status=status)
    with show.Watch(2, plan.header) as watch:
        watch.see(result)
    assert capsys.readouterr().err.startswith(f"  {done}, ")
