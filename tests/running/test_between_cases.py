"""What an earlier case-run left in the process: named in the failure, and brought back by the repro."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from attn_testkit.runner_modes.messages import RunCase
from test_worker_process import results_of

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import Status
from attn_testkit.results.failure_text import format_failure, repro_command
from attn_testkit.running.case_runs.between_cases import ENOUGH
from attn_testkit.running.case_runs.lane import Lane
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options, Request

HERE = Path(__file__).parent
CASES = tuple(f"decode-gqa2x2-d64-bf16-p16-k3.{n}-shuffled-gauss-b2prod" for n in (8, 10, 9, 5, 6))


def test_a_plan_that_a_module_keeps_is_found_and_the_printed_repro_fails() -> None:
    found = results_of("KeepsInAModule", cases=CASES[:2])
    passed = [result for result in found if result.status is Status.PASSED]
    (failed,) = (result for result in found if result.status is Status.FAILED)
    assert failed.after == (f"eager:{passed[0].case}",)
    assert "something is kept in a module global or a class attribute" in failed.findings[0].hint
    command = repro_command(failed)
    assert f"--after eager:{passed[0].case}" in command
    words = shlex.split(command)
    assert words.pop(0) == "attn-testkit"
    done = subprocess.run([sys.executable, "-m", "attn_testkit", *words], cwd=HERE, capture_output=True, check=False)
    assert done.returncode == 1
    alone = [word for word in words if word != "--after" and not word.startswith("eager:")]
    done = subprocess.run([sys.executable, "-m", "attn_testkit", *alone], cwd=HERE, capture_output=True, check=False)
    assert done.returncode == 0


def test_what_takes_several_case_runs_is_found_and_so_is_a_crash() -> None:
    found = results_of("WrongFromTheFourthInstanceOn", cases=CASES[:4])
    (failed,) = (result for result in found if result.status is Status.FAILED)
    assert failed.after == tuple(f"eager:{result.case}" for result in found[:3])
    (crashed,) = (r for r in results_of("CrashesTheSecondTime", cases=CASES[:2]) if r.status is Status.CRASHED)
    assert len(crashed.after) == 1
    assert "right in a fresh process" in format_failure(crashed)


def test_a_backend_that_is_wrong_anyway_is_asked_about_twice_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = Lane._fails_afresh

    def counted(self: Lane, before: Sequence[RunCase], *more: object) -> bool | None:
        asked.append(len(before))
        return original(self, before, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Lane, "_fails_afresh", counted)
    found = results_of("Wrong", cases=CASES[:5], diagnose="all")
    assert {result.status for result in found} == {Status.FAILED}
    assert all("fresh process" not in result.findings[0].hint for result in found)
    assert asked == [0] * ENOUGH
    asked.clear()
    results_of("TorchNativeBackend", cases=CASES[:2])
    assert asked == []


def test_in_one_process_it_cannot_be_reported_and_that_is_said() -> None:
    found = results_of("WrongFromTheFourthInstanceOn", cases=CASES[:4], in_process=True)
    (failed, *_) = (result for result in found if result.status is Status.FAILED)
    assert failed.after == ()
    assert "cannot find out whether an earlier case-run causes this failure" in failed.hints[0]


def test_after_takes_what_is_driven_first(capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["repro", "-b", "torch_native", "--device", "cpu", "--in-process", CASES[0]]
    assert main([*bad, "--after", "eagr:" + CASES[1]]) == 4
    assert "unknown execution 'eagr'; did you mean 'eager'?" in capsys.readouterr().err
    assert main([*bad, "--after", "no-such-case"]) == 4
    assert "--after: " in capsys.readouterr().err
    with pytest.raises(UsageError, match="--after: "):
        Runner(Options(after=("eager:nothing",))).plan(Request(("torch_native",), device="cpu", cases=CASES[:1]))
