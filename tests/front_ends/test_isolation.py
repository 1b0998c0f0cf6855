"""What a backend does to its own process costs one case-run, never the run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import fake_engine
import pytest

from attn_testkit.results import Status
from attn_testkit.running.pool import KIT_ERROR, Worker, WorkerStartError, run_isolated


def results_of(words: str, *, timeout_s: float = 120, jobs: int = 1, **more):
    plan = fake_engine.plan_run(backends=[f"fake:{words}"], modes=["decode"], executions=["eager"])
    found = list(run_isolated(plan, timeout_s=timeout_s, jobs=jobs, engine="fake_engine", **more))
    return {r.case.rpartition("-")[0].partition("-")[2]: r for r in found}, found


def test_a_crash_names_its_signal_and_last_words_and_the_run_goes_on():
    """A segfault must not take the results before and after it along."""
    by_word, found = results_of("ok,segfault,pid")
    assert [r.status for r in found] == [Status.PASSED, Status.CRASHED, Status.PASSED]
    reason = by_word["segfault"].reason
    assert reason.startswith("the process was killed by SIGSEGV")
    assert "about to read a freed page" in reason
    assert "in _segfault" in reason
    assert "Extension modules" not in reason


def test_a_process_that_ends_itself_is_a_crash_not_a_pass():
    """os._exit(0) inside a kernel wrapper must not look like success."""
    by_word, _ = results_of("exit,ok")
    assert by_word["exit"].status is Status.CRASHED
    assert "exit code 7" in by_word["exit"].reason
    assert by_word["ok"].status is Status.PASSED


def test_a_hang_is_timed_out_and_tells_where():
    """A tired reader needs the line that hangs, not only that something did."""
    by_word, found = results_of("hang,ok", timeout_s=1.5)
    assert [r.status for r in found] == [Status.TIMED_OUT, Status.PASSED]
    assert by_word["hang"].reason.startswith("no result after 1.5 s")
    assert "in _hang" in by_word["hang"].reason


def test_a_lost_device_context_costs_the_process_not_the_next_case():
    """Every case after a sticky CUDA error would fail in the same process."""
    by_word, found = results_of("pid,lost,pid")
    assert by_word["lost"].status is Status.CRASHED
    assert found[0].hints != found[2].hints


def test_what_the_device_said_on_stderr_is_kept():
    """A device-side assertion names its line only there."""
    by_word, _ = results_of("asserts,ok")
    assert by_word["asserts"].reason.splitlines() == [
        "CUDA error: device-side assert triggered",
        "  kernel.cu:12: Assertion `slot < size` failed.",
    ]


def test_a_worker_that_dies_between_case_runs_is_not_blamed_on_the_next():
    plan = fake_engine.plan_run(backends=["fake:latecrash,ok"], modes=["decode"], executions=["eager"])
    source = run_isolated(plan, timeout_s=120, engine="fake_engine")
    assert next(source).status is Status.PASSED
    time.sleep(0.5)
    assert [r.status for r in source] == [Status.PASSED]


def test_a_healthy_worker_serves_many_case_runs():
    """Importing torch once per case-run would make isolation unusable."""
    _, found = results_of("pid,pid,pid,pid")
    assert len({r.hints for r in found}) == 1
    assert found[0].hints != (f"pid {os.getpid()}",)


def test_the_kits_own_exception_is_not_a_verdict_on_the_backend():
    by_word, found = results_of("bug,ok")
    assert by_word["bug"].reason.startswith(KIT_ERROR + "ZeroDivisionError: a bug of the kit")
    assert [r.status for r in found] == [Status.CRASHED, Status.PASSED]


def test_jobs_share_the_work_and_lose_nothing():
    _, found = results_of("gpu,gpu,segfault,gpu,gpu,gpu,gpu,gpu", jobs=2, gpus=("3", "GPU-ab"))
    assert len(found) == 8
    assert {r.hints for r in found if r.hints} == {("gpu 3",), ("gpu GPU-ab",)}


def test_a_worker_that_cannot_start_says_why():
    """A broken installation would otherwise be blamed on every case in turn."""
    plan = fake_engine.plan_run(backends=["fake:ok"])
    with pytest.raises(WorkerStartError, match="No module named 'no_such_engine'"):
        list(run_isolated(plan, timeout_s=5, engine="no_such_engine"))


def test_a_spare_worker_is_used_and_ended():
    spare = Worker("fake_engine", 120)
    plan = fake_engine.plan_run(backends=["fake:pid"], modes=["decode"], executions=["eager"])
    (found,) = run_isolated(plan, timeout_s=120, engine="fake_engine", spare=spare)
    assert found.hints == (f"pid {spare._process.pid}",)
    assert spare._process.poll() is not None


def test_stopping_early_leaves_no_process_behind():
    plan = fake_engine.plan_run(backends=["fake:pid,hang"], modes=["decode"], executions=["eager"])
    source = run_isolated(plan, timeout_s=60, engine="fake_engine")
    pid = int(next(source).hints[0].split()[1])
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_children_die_with_a_parent_that_is_killed(tmp_path):
    """A cancelled CI job must not leave a process on the GPU."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path[:] = {sys.path!r}
            import fake_engine
            from attn_testkit.running.pool import run_isolated
            plan = fake_engine.plan_run(backends=["fake:pid,hang"], modes=["decode"], executions=["eager"])
            for result in run_isolated(plan, timeout_s=60, engine="fake_engine"):
                print(result.hints[0].split()[1], flush=True)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
