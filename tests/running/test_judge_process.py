"""The judge in its own process: what is asked and answered over the pipe, and how either end leaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from attn_testkit.registry import UsageError
from attn_testkit.running.planning.request import Item, Options
from attn_testkit.running.processes import judge_process
from attn_testkit.running.processes.judge_process import MOST_DEATHS, JudgeError, JudgeProcess, _answer, _environment

Made = Callable[..., Any]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Make processes that judge with ``quick_runner``; any type is a plan, a request or an item to it."""
    monkeypatch.setattr(judge_process, "RUNNER", "quick_runner")
    made: list[JudgeProcess] = []

    def make(options: Options | None = None, device: str = "cpu") -> Any:
        made.append(JudgeProcess(options, device))
        return made[-1]

    yield make
    for each in made:
        each.close()


def items(*cases: str) -> list[Item]:
    return [Item("", "", "", case) for case in cases]


def run(judge: Any, *cases: str, plan: str = "") -> list[str]:
    return [result.case for result in judge.run(plan, items(*cases))]


def test_plans_capabilities_and_results_come_back_one_question_after_the_other(judge: Made) -> None:
    one = judge(Options(jobs=3, timeout_s=7.0))
    assert one.plan("options") == Options(jobs=3, timeout_s=7.0)
    assert one.capabilities_lines(["m:A", "m:B"], "cpu") == [("m:A on cpu", ""), ("m:B on cpu", "")]
    assert one.device_name("cuda:1") == "name of cuda:1"
    assert run(one, "a", "b") == ["a", "b"]
    assert run(one) == []
    assert run(one, "c", "c") == ["c", "c"]
    assert judge().plan("options") == Options()


def test_it_is_another_process_that_a_ctrl_c_does_not_reach(judge: Made) -> None:
    one = judge()
    pid, session, _ = one.plan("")
    assert pid == one._process.pid != os.getpid()
    assert session == pid != os.getsid(0)
    os.kill(pid, signal.SIGINT)
    assert one.plan("")[0] == pid, "the front end ends it"


def test_wrong_usage_and_faults_of_the_kit_are_reported_apart_and_the_next_question_is_answered(judge: Made) -> None:
    one = judge()
    with pytest.raises(UsageError, match=r"^no case matches 'x'$"):
        one.plan("usage")
    assert one.plan("options") == Options()
    seen: list[str] = []
    with pytest.raises(JudgeError) as caught:
        seen.extend(result.case for result in one.run("", items("a", "bug")))
    assert seen == ["a"]
    assert str(caught.value).startswith("Traceback (most recent call last):\n")
    assert str(caught.value).endswith("\nZeroDivisionError: a bug of the kit")


def test_what_ran_when_a_judge_died_is_repeated_once_and_no_other_case_run_is(judge: Made) -> None:
    one = judge()
    pid = one.plan("")[0]
    results = {result.case: result for result in one.run("", items("a", "dies once", "dies", "b", "lingers", "c"))}
    assert {case: result.repeated for case, result in results.items() if result.repeated} == {
        "dies once": "the judge's process ended with exit code 9",
        "dies": "the judge's process ended with exit code 9",
        "lingers": "the judge's process ended with exit code 7",
    }
    assert [case for case, result in results.items() if result.of_the_kit] == ["dies", "lingers"]
    assert results["dies"].reason.endswith(
        "the judge's process ended with exit code 9; this was the second attempt, and in the first the judge's process "
        "ended with exit code 9"
    )
    assert list(results) == ["a", "dies once", "dies", "b", "lingers", "c"]
    assert one.plan("")[0] != pid


def test_a_judge_that_has_died_is_replaced_before_the_next_question(judge: Made) -> None:
    one, notes = judge(Options(jobs=3)), list[str]()
    one.note = notes.append
    one._process.kill()
    assert one.plan("options").jobs == 3
    assert notes == ["the judge's process was killed by SIGKILL; another one is starting"]
    gone, theirs = Pipe()
    theirs.close()
    one._connection = gone
    assert one.plan("options").jobs == 3


def test_the_budget_of_a_run_goes_on_with_another_judge(judge: Made) -> None:
    one = judge(Options(budget_s=9.0))
    assert one.plan("options").spent_s == 0
    one._began -= 5.0
    one._process.kill()
    assert 5.0 <= one.plan("options").spent_s < 60.0


def test_judges_that_die_without_a_result_between_end_the_run(judge: Made) -> None:
    one, seen = judge(), list[str]()
    ended = (
        rf"^the judge's process ended with exit code 9, as {MOST_DEATHS - 1} before it did, without a result between"
    )
    with pytest.raises(JudgeError, match=ended):
        seen.extend(result.case for result in one.run("", items("a", "dies at once", "b")))
    assert seen == ["a"]
    with pytest.raises(JudgeError, match="the judge's process ended"):
        one.plan("")


def test_a_judge_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, judge: Made) -> None:
    monkeypatch.setattr(judge_process, "RUNNER", "no_such_module")
    with pytest.raises(JudgeError, match=r"^the judge could not start: ModuleNotFoundError: No module named"):
        judge().plan("")


def test_results_that_are_given_up_take_the_judge_along_and_those_that_ended_do_not(
    judge: Made, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    one = judge(Options(gpus=(str(notes),), timeout_s=0.001))
    assert run(one, "a", plan=str(notes)) == ["a"]
    assert notes.read_text() == "given up or done\n"
    assert one._process.poll() is None
    source = one.run("", items("a", "b"))
    next(source)
    source.close()
    assert one._process.poll() == 0, "it ended by itself"


def test_a_judge_that_ends_its_workers_is_not_cut_short_by_being_reported_to_again(judge: Made, tmp_path: Path) -> None:
    """A front end closes the pipe and sends a signal as well, in either order."""
    notes = tmp_path / "notes"
    one = judge(Options(gpus=(str(notes),), timeout_s=0.5))
    one.plan("")
    one._connection.close()
    deadline = time.monotonic() + 60
    while not notes.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    one._process.send_signal(signal.SIGTERM)
    assert one._process.wait(60) == 0
    assert notes.read_text() == "closing\nclosed\n"


def test_a_storm_of_signals_ends_a_judge_and_never_leaves_it_waiting_for_itself(judge: Made, tmp_path: Path) -> None:
    for _ in range(5):
        one = judge(Options(gpus=(str(tmp_path / "notes"),), timeout_s=0.001))
        one.plan("")
        one._connection.close()
        deadline = time.monotonic() + 60
        while one._process.poll() is None and time.monotonic() < deadline:
            one._process.send_signal(signal.SIGTERM)
        assert one._process.poll() == 0


def test_an_alarm_of_the_callers_is_the_callers_and_not_the_end_of_the_judge(judge: Made) -> None:
    one = judge()
    one.plan("")

    class Late:
        def recv(self) -> object:
            raise TimeoutError("an alarm")

    ours = one._connection
    one._connection = Late()  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="an alarm"):
        one._receive("plan")
    one._connection = ours
    assert one._process.poll() is None
    assert one.plan("options") == Options()


def test_a_judge_whose_front_end_is_gone_ends_its_workers_and_itself(judge: Made, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    one = judge(Options(gpus=(str(notes),), timeout_s=0.001))
    one.plan("")
    one._connection.close()
    assert one._process.wait(60) == 0
    assert notes.read_text() == "closing\nclosed\n"


def test_a_judge_that_does_not_end_its_workers_in_time_is_killed(
    judge: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_process, "_PATIENCE", 0.2)
    one = judge(Options(gpus=(str(tmp_path / "notes"),), timeout_s=600.0))
    one.plan("")
    begun = time.monotonic()
    one.close()
    assert one._process.poll() == -signal.SIGKILL
    assert 0.2 <= time.monotonic() - begun < 60
    one.close()


def test_what_it_prints_does_not_reach_the_front_ends_stdout(judge: Made, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(judge(), "prints") == ["prints"]
    assert capfd.readouterr() == ("", "noise on stdout\n")


@pytest.mark.parametrize(
    ("device", "visible", "interpreted"),
    [("cpu", "0", "1"), ("auto", "", "1"), ("auto", "0", None), ("cuda", "", None), ("cuda", "0", None)],
)
def test_kernels_run_in_the_interpreter_where_no_gpu_is_asked_for_or_there(
    judge: Made, monkeypatch: pytest.MonkeyPatch, device: str, visible: str, interpreted: str | None
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = _environment(device)
    assert found.get("TRITON_INTERPRET") == interpreted
    assert found["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    if device == "cpu":
        assert judge(device=device).plan("")[2] == {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def test_what_the_caller_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found = _environment("cpu")
    assert (found["TRITON_INTERPRET"], found["OMP_NUM_THREADS"]) == ("0", "5")


def test_a_front_end_that_is_gone_in_the_middle_ends_what_runs_and_is_reported_nothing_more() -> None:
    closed = []

    def run(*_: object) -> Iterator[str]:
        try:
            yield from "abc"
        finally:
            closed.append("results")

    sent: list[object] = []

    def send(message: object) -> None:
        sent.append(message)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        _answer(Of(run=run), ("run", "", ()), Of(send=send))  # type: ignore[arg-type]
    assert (closed, sent) == (["results"], [("result", "a")])
