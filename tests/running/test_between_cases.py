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
from attn_testkit.contract import Execution
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure, repro_command
from attn_testkit.results.finding import Finding
from attn_testkit.running.case_runs.between_cases import ENOUGH, MOST_PREDECESSORS, explained_by_what_was_kept
from attn_testkit.running.case_runs.lane import Lane
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options, Request

HERE = Path(__file__).parent
FAILED = CaseResult("b", "decode", "eager", "z", Status.FAILED, (Finding("finite", "NaN", hint="look"),))


def requests(count: int) -> list[RunCase]:
    return [RunCase(f"c{index}", Execution.EAGER) for index in range(count)]


class Asked:
    """Answers whether the case-run fails after some others, and keeps what it was asked."""

    def __init__(self, *needed: str, alone: bool | None = False) -> None:
        self.needed, self.alone = set(needed), alone
        self.seen: list[list[str]] = []

    def __call__(self, before: Sequence[RunCase]) -> bool | None:
        self.seen.append([request.case for request in before])
        if not before:
            return self.alone
        return bool(self.needed) and self.needed <= set(self.seen[-1])


def test_the_one_before_is_named_where_it_alone_is_the_cause() -> None:
    asked = Asked("c4")
    found = explained_by_what_was_kept(FAILED, requests(5), asked)
    assert found is not None
    assert found.after == ("eager:c4",)
    assert found.findings[0].hint == (
        "right in a fresh process, wrong after eager:c4: something is kept in a module global or a class attribute, "
        "and outlives the instance\nlook"
    )
    assert asked.seen == [[], ["c4"]]


def test_the_search_goes_back_by_doubling_and_ends_with_all() -> None:
    asked = Asked("c0")
    found = explained_by_what_was_kept(FAILED, requests(5), asked)
    assert found is not None
    assert len(found.after) == 5
    assert "wrong after the 5 case-runs that repro names" in found.findings[0].hint
    assert [len(cases) for cases in asked.seen] == [0, 1, 2, 4, 5]


def test_where_nothing_brings_it_back_that_is_said() -> None:
    asked = Asked()
    found = explained_by_what_was_kept(FAILED, requests(3), asked)
    assert found is not None
    assert found.after == ()
    assert "also after the 3 case-runs before it:" in found.findings[0].hint
    assert "the repro below may pass" in found.findings[0].hint
    one = explained_by_what_was_kept(FAILED, requests(3), Asked(), search=False)
    assert one is not None
    assert "also after the case-run before it (of 3):" in one.findings[0].hint
    many = Asked()
    assert explained_by_what_was_kept(FAILED, requests(500), many) is not None
    assert max(map(len, many.seen)) == MOST_PREDECESSORS


@pytest.mark.parametrize("alone", [True, None])
def test_what_is_wrong_alone_or_cannot_be_reported_is_left_as_it_is(alone: bool | None) -> None:
    asked = Asked("c1", alone=alone)
    assert explained_by_what_was_kept(FAILED, requests(2), asked) is None
    assert asked.seen == [[]]
    assert explained_by_what_was_kept(FAILED, [], Asked()) is None


def test_a_crash_has_it_in_its_reason() -> None:
    crashed = CaseResult("b", "decode", "eager", "z", Status.CRASHED, reason="it died")
    found = explained_by_what_was_kept(crashed, requests(1), Asked("c0"))
    assert found is not None
    assert found.reason.startswith("it died\nright in a fresh process, wrong after eager:c0")
    assert found.after == ("eager:c0",)


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
