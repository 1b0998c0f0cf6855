"""A lane in its own process: it evaluates as a lane here does, and one that dies or hangs costs one case-run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_worker_process import THREE, TWO, alive

from attn_testkit.registry import BackendNotFound
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.names import KIT_ERROR
from attn_testkit.running.case_runs import lane_process
from attn_testkit.running.case_runs.between_cases import Afresh
from attn_testkit.running.case_runs.lane import Lane, Lost, Work
from attn_testkit.running.case_runs.lane_process import LaneProcess, ready
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Item, Options, Plan, Request

ONE = "decode-gqa2x2-d64-bf16-p16-k15-shuffled-gauss-b1prod"
RIGHT, WRONG = Candidate("torch_native"), Candidate("unruly_backends:Wrong")
HANGS = Candidate("unruly_backends:HangsInForward")


def plan_of(*candidates: Candidate) -> Plan:
    with contextlib.closing(Runner()) as runner:
        made = runner.plan(Request((RIGHT,), executions=("eager",), device="cpu", cases=(ONE,)))
    return replace(made, candidates=candidates, items=())


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(RIGHT, WRONG, HANGS)


@pytest.fixture
def lane() -> Iterator[LaneProcess]:
    with contextlib.closing(LaneProcess(Options())) as process:
        yield process


def work(candidate: Candidate, case: str) -> Work:
    return Work(Item(candidate.spec, "decode", "eager", case), None, Afresh())


def ending_of(lane: LaneProcess) -> CaseResult | Lost:
    while True:
        for each in ready([lane]):
            if (found := each.result()) is not None:
                return found[0]


def result_of(lane: LaneProcess) -> CaseResult:
    found = ending_of(lane)
    assert isinstance(found, CaseResult)
    return found


def run(lane: LaneProcess, plan: Plan, candidate: Candidate, case: str) -> CaseResult:
    lane.begin(plan, work(candidate, case))
    return result_of(lane)


def without_times(result: CaseResult) -> CaseResult:
    return replace(result, seconds={})


@pytest.mark.parametrize(("candidate", "status"), [(RIGHT, Status.PASSED), (WRONG, Status.FAILED)])
def test_a_right_and_a_wrong_backend_are_evaluated_as_they_are_here(
    lane: LaneProcess, plan: Plan, candidate: Candidate, status: Status
) -> None:
    apart = run(lane, plan, candidate, TWO)
    with contextlib.closing(Lane(Options())) as local:
        here, _ = local.run(plan, work(candidate, TWO))
    assert isinstance(here, CaseResult)
    assert apart.status is status, apart.reason
    assert without_times(apart) == without_times(here)
    assert apart.seconds.keys() == here.seconds.keys()


def children(pid: int) -> list[int]:
    """Processes that a process has forked."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (signal.SIGKILL, "the lane, which evaluates results of its worker: the process was killed by SIGKILL"),
        (signal.SIGSTOP, "the lane, which evaluates results of its worker: no result after "),
    ],
)
def test_a_lane_that_dies_or_hangs_costs_one_case_run_and_leaves_no_worker(
    lane: LaneProcess, plan: Plan, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, why: str
) -> None:
    monkeypatch.setattr(lane_process, "_GRACE", 0.2)
    lane.begin(plan, work(HANGS, THREE))
    assert lane.child is not None
    deadline = time.monotonic() + 30
    while not (workers := [each for child in children(lane.child.pid) for each in children(child)]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while lane.child.connection.poll(1.0):
        assert lane.result() is None, "it hangs"
    lane.child.wait_for(1.0)
    os.kill(lane.child.pid, how)
    found = ending_of(lane)
    assert isinstance(found, Lost if how == signal.SIGKILL else CaseResult), "one that hangs has taken its time"
    text = found.how if isinstance(found, Lost) else found.reason.removeprefix(KIT_ERROR)
    assert text.startswith(why), text
    deadline = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    assert run(lane, plan, RIGHT, ONE).status is Status.PASSED, "the next has another process, which is given the plan"


def test_only_a_lane_that_says_nothing_hangs(lane: LaneProcess, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis may take as long as it likes, while each of its drives does not."""
    lane.begin(plan, work(RIGHT, ONE))
    assert lane.child is not None
    signs = 0
    while (found := lane.result()) is None:
        signs += 1
        assert lane.child.seconds_left > lane._patience - 60
        (_,) = ready([lane])
    assert signs == 2, "the process has started; the start of its worker"
    assert found[0].status is Status.PASSED


def test_a_lane_that_cannot_start_says_why_and_blames_no_backend(
    lane: LaneProcess, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_process, "MODULE", "no_such_module")
    lane.begin(plan, work(RIGHT, ONE))
    found = ending_of(lane)
    assert isinstance(found, Lost)
    assert "No module named 'no_such_module'" in found.how


def test_no_worker_descends_from_a_process_that_has_held_an_expected_value(lane: LaneProcess) -> None:
    finds = Candidate("unruly_backends:FindsAnswers")
    plan = plan_of(finds)
    assert run(lane, plan, finds, ONE).status is Status.PASSED
    assert run(lane, plan, finds, TWO).status is Status.CRASHED, "its worker is gone, and the lane holds answers"
    (finding, *_) = run(lane, plan, finds, THREE).findings
    assert "answers of the oracle here: 0" in finding.headline


def test_ended_and_closed_it_leaves_no_process(lane: LaneProcess, plan: Plan) -> None:
    assert run(lane, plan, RIGHT, ONE).status is Status.PASSED
    assert lane.child is not None
    pid = lane.child.pid
    lane.end()
    lane.close()
    assert not alive(pid)
    lane.begin(plan, work(RIGHT, ONE))
    assert isinstance(ending_of(lane), Lost), "closed it starts nothing that lives"


def test_the_plan_crosses_once(lane: LaneProcess, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[object, ...]] = []
    tell = LaneProcess._tell

    def noted(self: LaneProcess, *message: object) -> None:
        sent.append(message)
        tell(self, *message)

    monkeypatch.setattr(LaneProcess, "_tell", noted)
    other = replace(plan)
    for each in (plan, plan, other):
        assert run(lane, each, RIGHT, ONE).status is Status.PASSED
    assert [message[1] for message in sent] == [plan, None, other]


class Describing:
    """In the place of ``Child``: gives a sign of life, and describes the backend, or says why it cannot."""

    ended = False

    def __init__(self, *answers: tuple[str, object]) -> None:
        self.connection, self._theirs = multiprocessing.Pipe()
        self.heard: list[object] = []
        for each in (None, *answers):
            self.says(each)

    def says(self, answer: object) -> None:
        self._theirs.send(answer)

    def tell(self, *_: object) -> None: ...

    def wait_until_started(self) -> None: ...

    def wait_for(self, seconds: float) -> None: ...

    def answer(self) -> object:
        self.heard.append(self.connection.recv())
        return self.heard[-1]

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "seen"),
    [(("described", "it"), [[None, ("described", "it")]]), (("not found", "no module"), [])],
    ids=["at once", "cannot be imported"],
)
def test_others_start_after_the_first_description(
    lane: LaneProcess, monkeypatch: pytest.MonkeyPatch, answer: tuple[str, object], seen: list[object]
) -> None:
    monkeypatch.setattr(lane_process, "_HEAD_START", 60.0)
    child = Describing(answer)
    monkeypatch.setattr(lane, "child", child)
    heard_before: list[object] = []
    with contextlib.suppress(BackendNotFound):
        lane.describe(RIGHT, "cpu", lambda: heard_before.append([*child.heard]))
    assert heard_before == seen
    assert child.heard[-1] == answer


def test_others_start_after_the_head_start_of_one_whose_import_takes_longer(
    lane: LaneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_process, "_HEAD_START", 0.3)
    child = Describing()
    monkeypatch.setattr(lane, "child", child)
    heard_before: list[object] = []

    def others_start() -> None:
        heard_before.append([*child.heard])
        child.says(("described", "it"))

    begun = time.monotonic()
    assert lane.describe(RIGHT, "cpu", others_start) == "it"
    assert time.monotonic() - begun >= 0.3
    assert heard_before == [[None]]
