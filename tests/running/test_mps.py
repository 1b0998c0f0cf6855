"""NVIDIA's MPS: the daemon of a run, who uses it, and what becomes of the case-runs that a fault of another may end.

The daemon's program is a fake; ``test_mps_on_a_gpu.py`` has a real one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attn_testkit.runner_modes.messages import Described, Rerun, RunCase, RunRecord

from attn_testkit.contract import Capabilities
from attn_testkit.registry import BackendNotFound, UsageError
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.names import KIT_ERROR
from attn_testkit.results.remarks import repeated_lines
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.case_runs import lane as lanes
from attn_testkit.running.case_runs import loop, worker_slot
from attn_testkit.running.case_runs.between_cases import Afresh
from attn_testkit.running.case_runs.lane import Lane, Lost, Work
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Item, Options, Plan, Request
from attn_testkit.running.processes import mps, mps_guard
from attn_testkit.running.processes.gpus import ANY_GPU, NO_DAEMON, Gpu
from attn_testkit.running.processes.mps import Daemon, DaemonError, Sharing, begin_sharing, without_daemon
from attn_testkit.running.processes.worker_process import WorkerLost

PROGRAM = Path(__file__).with_name(mps.PROGRAM)
GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a process on a machine that has the program, and no daemon; folders are made below this."""
    monkeypatch.setattr(mps.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mps, "_USUAL", str(tmp_path / "usual"))
    return {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes")}


def asked(machine: dict[str, str]) -> list[str]:
    return Path(machine["NOTES"]).read_text().splitlines()


def pid_in(folder: str) -> int:
    return int(Path(folder, mps_guard.PID_FILE).read_text())


def folders(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.glob("attn-testkit-mps-*")]


def is_over(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while condition() and time.monotonic() < until:
        time.sleep(0.02)
    return not condition()


def test_a_daemon_has_folders_of_its_own_and_leaves_neither_a_process_nor_a_file(
    machine: dict[str, str], tmp_path: Path
) -> None:
    daemon = Daemon(str(PROGRAM), {**machine, **GPU})
    pid = pid_in(daemon.pipe)
    assert mps_guard.is_of_mps(pid)
    daemon.close()
    assert not mps_guard.is_of_mps(pid)
    assert folders(tmp_path) == []
    start, *then = asked(machine)
    assert start == f"start, GPUs 0, log {Path(daemon.pipe).with_name('log')}"
    assert then == ["get_server_list", "quit -t 2"]


_STARTS = (
    "import os, sys, tempfile, time; tempfile.tempdir = sys.argv[2]\n"
    "from attn_testkit.running.processes.mps import Daemon\n"
    "print(Daemon(sys.argv[1], os.environ).pipe, flush=True)\n"
    "{end}"
)


@pytest.mark.parametrize("end", ["time.sleep(60)", "sys.exit(1)", "os._exit(0)", "os.kill(os.getpid(), 11)"])
def test_a_daemon_ends_with_the_process_that_started_it_however_that_ends(
    machine: dict[str, str], tmp_path: Path, end: str
) -> None:
    judge = subprocess.Popen(
        [sys.executable, "-c", _STARTS.format(end=end), PROGRAM, tmp_path],
        env={**os.environ, **machine},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert judge.stdout is not None
    pipe = judge.stdout.readline().strip()
    if "sleep" in end:
        assert mps_guard.is_of_mps(pid_in(pipe)), "it runs as long as its judge"
        os.killpg(judge.pid, signal.SIGKILL)
    judge.communicate()
    assert is_over(lambda: bool(folders(tmp_path)))
    assert asked(machine)[-1] == "quit -t 2"


def test_a_daemon_that_does_not_quit_is_killed(
    machine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(str(PROGRAM), {**machine, "FAULT": "hangs"})
    pid = pid_in(daemon.pipe)
    daemon.close()
    assert is_over(lambda: mps_guard.is_of_mps(pid))
    assert is_over(lambda: bool(folders(tmp_path)))


def test_another_process_that_has_got_the_id_is_not_killed() -> None:
    assert not mps_guard.is_of_mps(os.getpid())


def test_a_daemon_that_does_not_start_says_why_and_leaves_nothing(machine: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match=r"-d ended with exit code 1: Cannot create the pipe"):
        Daemon(str(PROGRAM), {**machine, "FAULT": "refuses"})
    assert folders(tmp_path) == []


def sharing(environment: dict[str, str], mps: str = "auto", jobs: int = 4, gpus: tuple[str, ...] = ()) -> Sharing:
    """How a run shares, whose daemon is ended again."""
    found = begin_sharing(mps, jobs, gpus, "auto", environment)
    if found.daemon is not None:
        assert found.pipe == found.daemon.pipe
        found.close()
    return found


def test_lanes_that_share_a_gpu_share_it_by_mps_and_the_header_says_so(machine: dict[str, str]) -> None:
    assert sharing({**machine, **GPU}).words == "4 lanes share the GPU by NVIDIA's MPS"
    two = {**machine, "CUDA_VISIBLE_DEVICES": "4,5"}
    assert sharing(two, gpus=("4", "5")).words == "4 lanes share 2 GPUs by NVIDIA's MPS"
    assert sharing({**machine, **GPU}, "on", jobs=1).words == "1 lane uses the GPU by NVIDIA's MPS"


def test_a_lane_with_a_gpu_of_its_own_needs_no_daemon(machine: dict[str, str]) -> None:
    assert sharing({**machine, **GPU}, jobs=1) == Sharing()
    assert sharing({**machine, "CUDA_VISIBLE_DEVICES": "4,5"}, jobs=2, gpus=("4", "5")) == Sharing()


def test_off_keeps_workers_from_a_daemon_that_runs(machine: dict[str, str]) -> None:
    found = sharing({**machine, **GPU}, "off")
    assert (found.words, found.gpu("")) == ("4 lanes share the GPU without MPS", Gpu("", NO_DAEMON))
    assert found.gpu("").variables == {"CUDA_MPS_PIPE_DIRECTORY": NO_DAEMON}


def without_program(machine: dict[str, str]) -> dict[str, str]:
    return {**machine, **GPU, "PATH": "/usr/bin:/bin"}


def test_without_the_program_auto_says_so_and_on_is_refused(machine: dict[str, str]) -> None:
    if shutil.which(mps.PROGRAM, path="/usr/bin:/bin"):
        pytest.skip("this machine has it")
    found = sharing(without_program(machine))
    assert found.words == "4 lanes share the GPU without MPS: nvidia-cuda-mps-control is not installed here"
    with pytest.raises(UsageError, match=r"^--mps on: nvidia-cuda-mps-control is not installed here; with --mps auto"):
        sharing(without_program(machine), "on")


def test_where_it_may_not_be_started_auto_says_why_and_on_is_refused(machine: dict[str, str]) -> None:
    refuses = {**machine, **GPU, "FAULT": "refuses"}
    assert sharing(refuses).words.endswith("-d ended with exit code 1: Cannot create the pipe")
    with pytest.raises(UsageError, match=r"^--mps on: .*Cannot create the pipe; with --mps auto"):
        sharing(refuses, "on")


@pytest.mark.parametrize(("device", "visible"), [("cpu", "0"), ("auto", ""), ("cuda", "-1")])
def test_without_a_gpu_there_is_nothing_to_share(machine: dict[str, str], device: str, visible: str) -> None:
    environment = {**machine, "CUDA_VISIBLE_DEVICES": visible}
    assert begin_sharing("auto", 4, (), device, environment) == Sharing()
    assert begin_sharing("off", 4, (), device, environment) == Sharing()
    with pytest.raises(UsageError, match=r"^--mps on: no GPU is used here"):
        begin_sharing("on", 4, (), device, environment)


def test_no_process_is_started_in_process() -> None:
    with pytest.raises(UsageError, match=r"^--in-process starts no process that could share a GPU"):
        Options(in_process=True, mps="on")


def test_clients_count_the_gpus_that_the_daemon_was_given(machine: dict[str, str]) -> None:
    found = sharing({**machine, "CUDA_VISIBLE_DEVICES": "4,5"}, gpus=("4", "5"))
    variables = found.gpu("5").variables
    assert variables == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_PIPE_DIRECTORY": found.pipe}
    assert found.gpu("5").without_mps().variables == {
        "CUDA_VISIBLE_DEVICES": "5", "CUDA_MPS_PIPE_DIRECTORY": NO_DAEMON,
    }  # fmt: skip
    assert found.gpu("").variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    named = sharing({**machine, "CUDA_VISIBLE_DEVICES": "GPU-4,GPU-5"}, gpus=("GPU-4", "GPU-5"))
    assert named.gpu("GPU-5").variables["CUDA_VISIBLE_DEVICES"] == "GPU-5", "a name is the same for everybody"


def test_a_daemon_that_runs_already_is_used_and_left_running(machine: dict[str, str]) -> None:
    usual = Path(mps._USUAL)
    (usual / "log").mkdir(parents=True)
    theirs = {**machine, **GPU, "CUDA_MPS_PIPE_DIRECTORY": str(usual), "CUDA_MPS_LOG_DIRECTORY": str(usual / "log")}
    subprocess.run([PROGRAM, "-d"], env=theirs, check=True)
    pid = pid_in(str(usual))
    try:
        for environment in (theirs, {**machine, **GPU}):
            found = sharing(environment)
            assert found.words == "4 lanes share the GPU by NVIDIA's MPS, of a daemon that runs here already"
            assert (found.pipe, found.daemon) == (str(usual), None)
        assert mps_guard.is_of_mps(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert is_over(lambda: mps_guard.is_of_mps(pid))
    assert sharing({**machine, **GPU}).pipe != str(usual), "one that has ended is not waited for"


IN_MPS = Gpu("0", "/pipe", "0")
ALONE = Gpu("0", NO_DAEMON)
CASE = "decode-gqa2x2-d32-fp32-p4-k1-shuffled-gauss-b1prod"
ITEM = Item("m:A", "decode", "eager", CASE)
NEXT = replace(ITEM, execution="graph")
HEADER = RunHeader("1", "", "", "smoke", 0, "cuda", "GPU", {}, {}, 0)
PLAN = Plan(HEADER, (ITEM, NEXT), (), (Candidate("m:A"),), "auto")

Driven = Callable[[Any], RunRecord]


class Client:
    """In the place of ``Worker``: what it answers depends on whether it is a client of the daemon."""

    made: list[Client]
    answers: Driven

    def __init__(self, candidate: Candidate, device: str, timeout_s: float, *, gpu: Gpu = ANY_GPU) -> None:
        self.candidate, self.device, self.gpu = candidate, device, gpu
        self.ended, self.printed, self.history, self.begun = False, "", [], []  # type: ignore[var-annotated]
        Client.made.append(self)

    def describe(self) -> Described:
        return Described(Capabilities(eager={"decode"}))

    def drive(self, request: RunCase | Rerun) -> RunRecord:
        return Client.answers(self) if self.gpu.in_mps else RunRecord()

    def ahead(self, request: RunCase) -> None:
        self.begun.append(request)

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        self.ended = True


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CaseResult]]:
    """Run two case-runs in a lane; the answers of clients, and how both are evaluated, can be given."""
    Client.made, Client.answers = [], lambda client: RunRecord()  # type: ignore[assignment]
    monkeypatch.setattr(worker_slot, "Worker", Client)

    def run(answers: Driven, evaluate: Callable[..., CaseResult] = of_record, **options: Any) -> list[CaseResult]:
        Client.answers = staticmethod(answers)  # type: ignore[assignment]
        monkeypatch.setattr(lanes, "evaluate_item", lambda drive, described, plan, asked: evaluate(drive, asked.item))
        lane = Lane(Options(jobs=2, **options), IN_MPS)
        found = []
        for item, following in ((ITEM, NEXT), (NEXT, None)):
            result, _ = lane.run(PLAN, Work(item, following, Afresh()))
            assert not isinstance(result, Lost)
            found.append(result)
        lane.close()
        return found

    return run


def of_record(drive: Driven, item: Item) -> CaseResult:
    record = drive(RunCase(item.case, item.execution))  # type: ignore[arg-type]
    status = Status.CRASHED if record.lost else Status.FAILED if record.findings else Status.PASSED
    return CaseResult(item.backend, item.mode, item.execution, item.case, status, record.findings, reason=record.lost)


FAULT = "CUDA error: an illegal memory access was encountered"


def raises(error: Exception) -> Driven:
    def drive(client: object) -> RunRecord:
        raise error

    return drive


def says(headline: str) -> Driven:
    return lambda client: RunRecord(findings=(Finding("completes", headline),))


ENDINGS: dict[str, tuple[Driven, str]] = {
    "lost": (lambda client: RunRecord(lost=FAULT), FAULT),
    "killed": (raises(WorkerLost(Status.CRASHED, "killed by SIGABRT")), "killed by SIGABRT"),
    "hangs": (raises(WorkerLost(Status.TIMED_OUT, "no result after 300 s")), "no result after 300 s"),
    "no device": (raises(BackendNotFound("device 'cuda' is not available")), "device 'cuda' is not available"),
    "harness": (raises(RuntimeError("the worker failed")), f"{KIT_ERROR}RuntimeError: the worker failed"),
    "raised": (says(f"forward raised RuntimeError: {FAULT}"), f"forward raised RuntimeError: {FAULT}"),
    "Triton": (says("Triton Error [CUDA]"), "Triton Error [CUDA]"),
}  # fmt: skip


@pytest.mark.parametrize(("answers", "how"), ENDINGS.values(), ids=ENDINGS)
def test_a_healthy_case_run_that_ends_for_the_fault_of_another_is_repeated_without_mps_and_that_counts(
    judged: Callable[..., list[CaseResult]], answers: Driven, how: str
) -> None:
    first, second = judged(answers)
    assert (first.status, first.repeated) == (Status.PASSED, f"under MPS: {how}")
    assert (second.status, second.repeated) == (Status.PASSED, "")
    assert [(client.gpu, client.device) for client in Client.made] == [(IN_MPS, "cuda"), (ALONE, "auto")]
    assert repeated_lines([first, second]) == [
        f"repeated without MPS, where a fault of one process may end those of all lanes: 1: {how}"
    ]


def test_the_faulty_one_fails_again_alone_and_that_counts(
    judged: Callable[..., list[CaseResult]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "drive", lambda client, request: RunRecord(lost=FAULT))
    first, _ = judged(lambda client: RunRecord(), asks_afresh=False)
    assert (first.status, first.reason, first.repeated) == (Status.CRASHED, FAULT, f"under MPS: {FAULT}")


@pytest.mark.parametrize(
    "answers", [lambda client: RunRecord(), says("request 3 differs from the oracle")], ids=["right", "wrong numbers"]
)
def test_a_result_that_no_other_process_can_have_caused_is_not_repeated(
    judged: Callable[..., list[CaseResult]], answers: Driven
) -> None:
    found = judged(answers, asks_afresh=False)
    assert [result.repeated for result in found] == ["", ""]
    assert [client.gpu for client in Client.made] == [IN_MPS], "one worker of both"


def test_a_diagnosis_that_a_fault_ends_is_made_again(judged: Callable[..., list[CaseResult]]) -> None:
    """A worker that is lost over a question of a diagnosis answers that it was wrong: a hint would be made of that."""
    count = iter(range(100))

    def evaluate(drive: Driven, item: Item) -> CaseResult:
        hint = ""
        drive(RunCase(item.case, item.execution))  # type: ignore[arg-type]
        try:
            drive(RERUN)
        except WorkerLost:
            hint = "it was wrong there, too"
        finding = Finding("matches-oracle", "differs", hint=hint)
        return replace(of_record(lambda request: RunRecord(), item), status=Status.FAILED, findings=(finding,))

    def answers(client: object) -> RunRecord:
        if next(count) == 1:
            raise WorkerLost(Status.CRASHED, "the process was killed by SIGABRT")
        return RunRecord()

    first, _ = judged(answers, evaluate, asks_afresh=False)
    assert (first.findings[0].hint, first.repeated) == ("", "under MPS: the process was killed by SIGABRT")


RERUN = object.__new__(Rerun)


def test_a_case_run_that_was_begun_ahead_and_ends_the_worker_is_no_reason_to_repeat_this_one(
    judged: Callable[..., list[CaseResult]],
) -> None:
    first, second = judged(raises(WorkerLost(Status.CRASHED, "killed", of_another=True)))
    assert [(each.status, each.repeated) for each in (first, second)] == [(Status.PASSED, "")] * 2
    assert [client.gpu for client in Client.made] == [IN_MPS, ALONE]


def test_a_fresh_process_shares_no_context(judged: Callable[..., list[CaseResult]]) -> None:
    judged(says("request 3 differs from the oracle"), evaluate=of_record)
    fresh = [client.gpu for client in Client.made[1:]]
    assert fresh
    assert {*fresh} == {ALONE}


def test_a_run_of_several_lanes_ends_its_daemon_and_says_what_it_shares(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**machine, **GPU}.items():
        monkeypatch.setenv(name, value)
    runner = Runner(Options(jobs=3))
    runner._share("auto")
    found = runner._sharing
    assert found is not None
    assert found.words == "3 lanes share the GPU by NVIDIA's MPS"
    assert [runner._lane(index)._gpu.mps for index in range(3)] == [found.pipe] * 3  # type: ignore[union-attr]
    pid = pid_in(found.pipe)
    runner._share("auto")
    assert runner._sharing is found, "once"
    runner.close()
    assert not mps_guard.is_of_mps(pid)


def test_if_no_worker_can_be_a_client_the_run_goes_on_without_and_on_is_refused(
    machine: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This machine has no GPU: what a worker is told of a GPU that it cannot reach is the same."""
    for name, value in {**machine, **GPU}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loop, "LaneProcess", Lane)
    runner = Runner(Options(jobs=2))
    try:
        made = runner.plan(Request(("torch_native",), modes=("decode",), executions=("eager",)))
        assert made.items
        assert (made.header.device, made.header.sharing) == ("emulated", "")
        assert runner._sharing is not None
        assert runner._sharing.words.startswith("2 lanes share the GPU without MPS: device 'cuda' is not available")
        assert folders(tmp_path) == [], "and the daemon has ended"
    finally:
        runner.close()
    runner = Runner(Options(jobs=2, mps="on"))
    try:
        with pytest.raises(UsageError, match=r"^--mps on: device 'cuda' is not available"):
            runner.plan(Request(("torch_native",)))
    finally:
        runner.close()
    assert is_over(lambda: bool(folders(tmp_path)))


def test_a_daemon_that_is_given_up_is_said_in_the_header() -> None:
    found = without_daemon(Sharing("2 lanes share the GPU by NVIDIA's MPS", "/pipe"), "why", "auto")
    assert found == Sharing("2 lanes share the GPU without MPS: why", NO_DAEMON)
