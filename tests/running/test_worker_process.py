"""What a backend does to its own process costs one case-run, never the run, and never gives a green."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from alive import alive

from attn_testkit.registry import BackendNotFound
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.names import KIT_ERROR
from attn_testkit.results.run_header import exit_code
from attn_testkit.running.case_runs import lane
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options, Plan, Request
from attn_testkit.running.processes import forking
from attn_testkit.running.processes.worker_process import WorkerStartError

HERE = Path(__file__).parent
THREE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"
"""Three requests: where an unruly backend acts."""
TWO = "decode-gqa2x2-d64-bf16-p16-k3.15-shuffled-gauss-b2prod"


@pytest.fixture
def runners() -> Iterator[list[Runner]]:
    """Runners to be closed."""
    made: list[Runner] = []
    yield made
    for runner in made:
        runner.close()


def plan_for(runner: Runner, *names: str, cases: tuple[str, ...] = (THREE, TWO)) -> Plan:
    specs = tuple(name if ":" in name else f"unruly_backends:{name}" for name in names)
    return runner.plan(Request(specs, executions=("eager",), device="cpu", cases=cases))


def results_of(*names: str, cases: tuple[str, ...] = (THREE, TWO), **options) -> list[CaseResult]:
    with contextlib.closing(Runner(Options(**options))) as runner:
        plan = plan_for(runner, *names, cases=cases)
        return list(runner.run(plan, plan.items))


def test_a_crash_names_its_signal_and_last_words_and_the_run_goes_on() -> None:
    """A segfault must not take the results before and after it along."""
    found = {result.case: result for result in results_of("Segfaults")}
    assert found[TWO].status is Status.PASSED
    assert found[THREE].status is Status.CRASHED
    reason = found[THREE].reason
    assert reason.startswith("the process was killed by SIGSEGV")
    assert "about to read a freed page" in reason
    assert "in act" in reason
    assert "Extension modules" not in reason


def test_a_process_that_ends_itself_is_a_crash_and_no_pass() -> None:
    """os._exit(0) inside a kernel wrapper must not look like success."""
    found = {result.case: result for result in results_of("ExitsInForward")}
    assert found[THREE].status is Status.CRASHED
    assert found[THREE].reason.startswith("the process ended itself with exit code 0")
    assert found[TWO].status is Status.PASSED


@pytest.mark.parametrize(("name", "kind"), [("QuitsInForward", "SystemExit"), ("RaisesBaseException", "GeneratorExit")])
@pytest.mark.parametrize("in_process", [False, True])
def test_an_exception_that_ends_programs_is_a_finding(name: str, kind: str, in_process: bool) -> None:
    """sys.exit in a kernel wrapper would end the command with the backend's own exit code."""
    (found,) = results_of(name, cases=(THREE,), in_process=in_process)
    assert found.status is Status.FAILED
    assert found.findings[0].check == "completes"
    assert f"forward raised {kind}" in found.findings[0].headline


@pytest.mark.parametrize(
    ("name", "check", "headline"),
    [
        ("QuitsInConstructor", "completes", "the constructor raised SystemExit: this machine has no kernels"),
        ("QuitsInAHook", "completes", "init_forward_metadata raised SystemExit: 0"),
        ("QuitsWhereItShouldRefuse", "refuses-undeclared", "the constructor raised SystemExit instead of Unsupported"),
    ],
)
@pytest.mark.parametrize("in_process", [False, True])
def test_a_backend_that_ends_programs_ends_no_run_wherever_it_does(
    name: str, check: str, headline: str, in_process: bool
) -> None:
    (found,) = results_of(name, cases=(THREE,), in_process=in_process)
    assert found.status is Status.FAILED, found.reason
    assert (found.findings[0].check, headline in found.findings[0].headline) == (check, True), found.findings


def test_an_interrupt_that_a_backend_raises_is_a_finding_where_no_ctrl_c_arrives() -> None:
    """Ctrl-C reaches the front end alone. In one process with the user's terminal it may be the user's, and ends it."""
    (found,) = results_of("RaisesKeyboardInterrupt", cases=(THREE,))
    assert found.status is Status.FAILED, found.reason
    assert "forward raised KeyboardInterrupt" in found.findings[0].headline
    with pytest.raises(KeyboardInterrupt):
        results_of("RaisesKeyboardInterrupt", cases=(THREE,), in_process=True)


def test_a_hang_is_timed_out_and_says_where() -> None:
    """A tired reader needs the line that hangs, not only that something did."""
    found = {result.case: result for result in results_of("HangsInForward", timeout_s=8.0)}
    assert found[THREE].status is Status.TIMED_OUT
    assert found[THREE].reason.startswith("no result after 8 s")
    assert "in act" in found[THREE].reason
    assert found[TWO].status is Status.PASSED


def test_a_lost_device_context_costs_the_process_and_not_the_next_case() -> None:
    """Every case after a sticky CUDA error would fail in the same process; what the device said stands on stderr."""
    found = {result.case: result for result in results_of("LosesTheDevice")}
    assert found[THREE].status is Status.CRASHED
    assert found[THREE].reason.splitlines() == [
        "CUDA error: device-side assert triggered",
        "  kernel.cu:12: Assertion `slot < size` failed.",
    ]
    assert found[TWO].status is Status.PASSED


def test_in_one_process_a_lost_context_leaves_the_rest_not_run() -> None:
    found = results_of("LosesTheDevice", cases=(THREE, TWO), in_process=True)
    by_case = {result.case: result for result in found}
    assert by_case[THREE].status is Status.CRASHED
    if found[0].case == THREE:
        assert by_case[TWO].status is Status.NOT_RUN_HERE
        assert THREE in by_case[TWO].reason
    assert exit_code(2, found) == 1


def pid_of(result: CaseResult) -> str:
    return result.findings[0].headline.partition("pid ")[2].split()[0]


def test_one_worker_serves_many_case_runs_of_one_backend_and_none_of_another() -> None:
    """Importing a backend once per case-run would make isolation unusable; sharing a process would let it be spoilt."""
    found = results_of("ReportsPid", "ReportsPidAgain")
    by_backend = {
        name: {pid_of(r) for r in found if r.backend.endswith(name)} for name in ("ReportsPid", "ReportsPidAgain")
    }
    assert [len(pids) for pids in by_backend.values()] == [1, 1]
    assert by_backend["ReportsPid"] != by_backend["ReportsPidAgain"]
    assert str(os.getpid()) not in by_backend["ReportsPid"] | by_backend["ReportsPidAgain"]


def test_jobs_share_the_work_and_the_gpus_and_lose_nothing() -> None:
    cases = tuple(f"decode-gqa2x2-d64-bf16-p16-k3.{n}-shuffled-gauss-b2prod" for n in range(4, 12))
    found = results_of("ReportsPid", cases=cases, jobs=2, gpus=("3", "GPU-ab"))
    assert sorted(result.case for result in found) == sorted(cases)
    assert {result.findings[0].headline.rpartition("gpu ")[2] for result in found} == {"3", "GPU-ab"}


def test_the_kits_own_exception_is_no_verdict_on_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> CaseResult:
        raise ZeroDivisionError("a bug of the kit")

    monkeypatch.setattr(lane, "evaluate_item", fails)
    found = results_of("Wrong")
    assert {result.status for result in found} == {Status.CRASHED}
    assert found[0].reason.startswith(KIT_ERROR + "ZeroDivisionError: a bug of the kit")


def test_a_worker_that_cannot_start_says_why_and_blames_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation would otherwise be blamed on every backend in turn."""
    monkeypatch.setattr(forking, "SERVE", "no_such_module")
    with pytest.raises(WorkerStartError, match="could not start: the process ended itself with exit code 1"):
        results_of("Wrong")


def test_a_module_that_ends_its_process_at_import_is_no_backend() -> None:
    with pytest.raises(BackendNotFound, match=r"exits_at_import:Backend.*ended itself with exit code 0"):
        results_of("exits_at_import:Backend")


def test_giving_up_early_leaves_no_process_behind(runners: list[Runner]) -> None:
    runner = Runner(Options(jobs=2))
    runners.append(runner)
    plan = plan_for(runner, "ReportsPid")
    source = runner.run(plan, plan.items)
    pid = int(pid_of(next(source)))
    source.close()
    runner.close()
    assert not alive(pid)


@pytest.mark.parametrize("jobs", [1, 2])
def test_workers_die_with_a_judge_that_is_killed(tmp_path: Path, jobs: int) -> None:
    """A cancelled CI job must not leave a process on the GPU."""
    script = tmp_path / "evaluate.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path[:0] = [{str(HERE)!r}]
            from attn_testkit.running.case_runs.loop import Runner
            from attn_testkit.running.planning.request import Options, Request
            if __name__ == "__main__":
                runner = Runner(Options(jobs={jobs}))
                backends = ("unruly_backends:ReportsPid",)
                request = Request(backends, executions=("eager",), device="cpu", cases=({TWO!r},))
                plan = runner.plan(request)
                for result in runner.run(plan, plan.items):
                    print(result.findings[0].headline.partition("pid ")[2].split()[0], flush=True)
                input()
            """
        )
    )
    judge = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert judge.stdout is not None
    assert judge.stdin is not None
    worker = int(judge.stdout.readline())
    assert alive(worker)
    judge.kill()
    judge.wait()
    judge.stdout.close()
    judge.stdin.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and alive(worker):
        time.sleep(0.05)
    assert not alive(worker)
