"""The loop over case-runs: who gets which worker, what becomes of a worker that dies, and words about how it ended."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from attn_testkit.runner_modes.messages import Described, Rerun, RunCase, RunRecord

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, Execution
from attn_testkit.registry import BackendNotFound, UsageError
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.names import KIT_ERROR
from attn_testkit.results.run_header import RunHeader
from attn_testkit.running.case_runs import lane, loop, worker_main, worker_slot
from attn_testkit.running.case_runs.between_cases import Afresh
from attn_testkit.running.case_runs.case_run import CaseRun
from attn_testkit.running.case_runs.lane import Lane, Work
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.case_runs.waiting import Waiting, groups_of
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.running.planning.candidate import Candidate, candidate_for
from attn_testkit.running.planning.request import Item, Options, Plan, Request
from attn_testkit.running.processes import judge_process, worker_process
from attn_testkit.running.processes.child import MOST_BYTES, _last_lines, _tail, ending
from attn_testkit.running.processes.gpus import ANY_GPU, Gpu
from attn_testkit.running.processes.judge_process import judge_for
from attn_testkit.running.processes.worker_process import WorkerLost

HEADER = RunHeader("1", "", "", "smoke", 0, "emulated", "CPU", {}, {}, 0)
A, B = Candidate("m:A"), Candidate("m:B")
CAPABILITIES = Capabilities(eager={"decode"})


def case(number: int) -> str:
    """The id of a case, one for each number."""
    return f"decode-gqa2x2-d32-fp32-p4-k{number + 1}-shuffled-gauss-b1prod"


X, Y, Z = (case(number) for number in range(3))


class FakeWorker:
    """In the place of ``worker_process.Worker``."""

    made: list[FakeWorker]
    begun: list[object]
    alive = 0
    most = 0

    def __init__(self, candidate: Candidate, device: str, timeout_s: float, *, gpu: Gpu = ANY_GPU) -> None:
        self.candidate, self.device, self.timeout_s, self.gpu = candidate, device, timeout_s, gpu
        self.ended = False
        self.printed = ""
        self.history: list[RunCase] = []
        FakeWorker.made.append(self)
        FakeWorker.alive += 1
        FakeWorker.most = max(FakeWorker.most, FakeWorker.alive)

    def describe(self) -> Described:
        return Described(CAPABILITIES)

    def last_words(self) -> str:
        return "\n  last words"

    def drive(self, request: object) -> RunRecord:
        return RunRecord()

    def ahead(self, request: object) -> None:
        FakeWorker.begun.append(request)

    def close(self) -> None:
        FakeWorker.alive -= not self.ended
        self.ended = True


Judging = Callable[[Callable[..., RunRecord], Described, Plan, Item], CaseResult]


class ThreadedLane:
    """In the place of ``LaneProcess``: a lane in a thread."""

    made: ClassVar[list[ThreadedLane]] = []

    def __init__(self, options: Options, gpu: Gpu = ANY_GPU) -> None:
        self.lane, self.gpu, self.closed = Lane(options, gpu), gpu, False
        self.found: queue.SimpleQueue[tuple[CaseResult, bool | None] | BaseException] = queue.SimpleQueue()
        self.work: list[Work] = []
        ThreadedLane.made.append(self)
        self.start, self.describe = self.lane.start, self.lane.describe

    def begin(self, plan: Plan, work: Work) -> None:
        self.work.append(work)

        def run() -> None:
            try:
                self.found.put(self.lane.run(plan, work))
            except BaseException as error:
                self.found.put(error)

        threading.Thread(target=run, daemon=True).start()

    def result(self) -> tuple[CaseResult, bool | None]:
        found = self.found.get(timeout=20)
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None: ...

    def close(self) -> None:
        self.closed = True
        self.lane.close()


def through(busy: Sequence[Any]) -> list[Any]:
    """In the place of ``ready``."""
    while busy and not any(isinstance(each, Lane) or not each.found.empty() for each in busy):
        time.sleep(0.001)
    return [each for each in busy if isinstance(each, Lane) or not each.found.empty()]


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> list[Judging]:
    """How items are judged: the last entry counts."""
    FakeWorker.made, FakeWorker.begun, FakeWorker.alive, FakeWorker.most = [], [], 0, 0
    how: list[Judging] = [lambda drive, described, plan, item: passed(item)]
    monkeypatch.setattr(worker_slot, "Worker", FakeWorker)
    monkeypatch.setattr(worker_slot, "LocalWorker", lambda candidate, device: FakeWorker(candidate, device, 0))
    monkeypatch.setattr(
        lane, "evaluate_item", lambda drive, described, plan, asked: how[-1](drive, described, plan, asked.item)
    )
    ThreadedLane.made = []
    monkeypatch.setattr(loop, "LaneProcess", ThreadedLane)
    monkeypatch.setattr(loop, "_ready", through)
    return how


def passed(item: Item) -> CaseResult:
    return CaseResult(item.backend, item.mode, item.execution, item.case, Status.PASSED)


def item(backend: str, case: str, execution: str = "eager") -> Item:
    return Item(backend, "decode", execution, case)


def plan(*items: Item) -> Plan:
    return Plan(HEADER, items, (), (A, B), "cpu")


def results(*items: Item, **options: object) -> list[CaseResult]:
    runner = Runner(Options(**options))  # type: ignore[arg-type]
    found = list(runner.run(plan(*items), items))
    runner.close()
    return found


SIX = [item(spec, case, execution) for spec in ("m:A", "m:B") for case in (X, Y) for execution in ("eager", "graph")]


def test_neighbours_that_share_backend_and_case_are_one_group() -> None:
    assert [[(i.backend, i.case) for i in group] for group in groups_of(SIX)] == [
        [(spec, case)] * 2 for spec in ("m:A", "m:B") for case in (X, Y)
    ]
    apart = [item("m:A", X), item("m:A", Y), item("m:A", X)]
    assert [len(group) for group in groups_of(apart)] == [1, 1, 1]
    assert groups_of([]) == []


def test_one_worker_a_backend_and_never_two_at_a_time(judging: list[Judging]) -> None:
    found = results(*SIX, timeout_s=7.0)
    assert [(r.backend, r.case, r.execution) for r in found] == [(i.backend, i.case, i.execution) for i in SIX]
    assert [w.candidate for w in FakeWorker.made] == [A, B]
    assert {(w.device, w.timeout_s, w.gpu) for w in FakeWorker.made} == {("cpu", 7.0, ANY_GPU)}
    assert (FakeWorker.most, FakeWorker.alive) == (1, 0)


def test_an_idle_worker_of_the_same_backend_is_used_again_and_one_of_another_is_ended(judging: list[Judging]) -> None:
    runner = Runner()
    assert runner.declared(A, "cpu") is CAPABILITIES
    assert runner.declared(A, "cpu") is CAPABILITIES
    assert len(FakeWorker.made) == 1, "asked once"
    list(runner.run(plan(SIX[0]), [SIX[0]]))
    assert len(FakeWorker.made) == 1
    runner.declared(B, "cpu")
    assert [w.ended for w in FakeWorker.made] == [True, False]
    FakeWorker.made[1].close()
    list(runner.run(plan(SIX[4]), [SIX[4]]))
    assert len(FakeWorker.made) == 3, "one that ended is not used again"
    runner.close()
    assert all(w.ended for w in FakeWorker.made)


def asked(*specs: str, **more: object) -> Request:
    return Request(specs, device="cpu", **more)  # type: ignore[arg-type]


def test_the_first_worker_imports_while_the_device_is_asked_for(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver with several GPUs takes seconds to answer, in each process."""
    real, then = loop.resolve, list[list[str]]()

    def resolve(name: str) -> Any:
        then.append([w.candidate.spec for w in FakeWorker.made])
        return real(name)

    monkeypatch.setattr(loop, "resolve", resolve)
    runner = Runner()
    for _ in range(2):
        runner.plan(asked("torch_native", "triton", modes=("decode",)))
    assert then == [["torch_native"], ["torch_native", "triton"]], "what is described already is not imported again"
    Runner(Options(in_process=True)).plan(asked("torch_native", modes=("decode",)))
    assert len(then[2]) == 2, "in this process, only when it is known what device it has"
    runner.close()


def test_all_workers_of_a_run_start_while_its_plan_is_made_and_no_more(judging: list[Judging]) -> None:
    runner = Runner(Options(jobs=3, gpus=("0", "1"), timeout_s=7.0))
    made = runner.plan(asked("torch_native", modes=("decode",)))
    assert [(w.candidate.spec, w.gpu, w.timeout_s) for w in FakeWorker.made] == [
        ("torch_native", Gpu(gpu), 7.0) for gpu in ("0", "1", "0")
    ]
    list(runner.run(made, made.items))
    assert len(FakeWorker.made) == 3, "the run uses those"
    runner.close()
    assert FakeWorker.alive == 0


def test_all_workers_import_the_backend_before_the_first_one_is_asked_what_it_declares(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def describe(self: FakeWorker) -> Described:
        started.append(len(FakeWorker.made))
        return Described(CAPABILITIES)

    monkeypatch.setattr(FakeWorker, "describe", describe)
    runner = Runner(Options(jobs=3))
    runner.plan(asked("torch_native", modes=("decode",)))
    assert started == [3]
    runner.close()


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (asked("torch_native", "triton"), Options(jobs=3)),
        (asked("torch_native", cases=("decode-*",)), Options(jobs=3)),
        (asked("torch_native"), Options(jobs=3, in_process=True)),
        (asked("torch_native"), Options(jobs=1)),
    ],
    ids=["two backends", "few cases", "in process", "one job"],
)
def test_no_worker_starts_before_it_is_known_that_it_is_wanted(
    judging: list[Judging], request_: Request, options: Options
) -> None:
    runner = Runner(options)
    runner.plan(request_)
    assert FakeWorker.alive == 1
    runner.close()


def test_a_worker_that_cannot_start_ahead_fails_no_plan(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FirstAlone(FakeWorker):
        def __init__(self, *given: Any, **more: Any) -> None:
            if FakeWorker.made:
                raise worker_process.WorkerStartError("no process could be started")
            super().__init__(*given, **more)

    monkeypatch.setattr(worker_slot, "Worker", FirstAlone)
    runner = Runner(Options(jobs=3))
    assert runner.plan(asked("torch_native")).items
    runner.close()


def test_jobs_share_the_groups_the_gpus_and_lose_nothing(judging: list[Judging]) -> None:
    together = threading.Barrier(2, timeout=20)

    def judge(drive: object, described: Described, plan: Plan, each: Item) -> CaseResult:
        if each.case == X and each.execution == "eager":
            together.wait()
        return passed(each)

    judging.append(judge)
    found = results(*SIX, jobs=2, gpus=("g0", "g1"))
    assert sorted((r.backend, r.case, r.execution) for r in found) == sorted(
        (i.backend, i.case, i.execution) for i in SIX
    )
    assert {w.gpu for w in FakeWorker.made} == {Gpu("g0"), Gpu("g1")}
    assert FakeWorker.alive == 0
    runner = Runner(Options(jobs=4, gpus=("g0", "g1")))
    assert [runner._lane(i).gpu for i in range(4)] == [*map(Gpu, ("g0", "g1", "g0", "g1"))]  # type: ignore[union-attr]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_case_run_that_no_worker_could_begin_is_repeated_once_and_its_lane_goes_on(
    judging: list[Judging], jobs: int, attempts: int
) -> None:
    left = [attempts]

    def judge(drive: object, described: Described, plan: Plan, each: Item) -> CaseResult:
        if each == replace(SIX[1], lost=each.lost) and left[0]:
            left[0] -= 1
            raise worker_process.WorkerStartError(f"{left[0]} left")
        return passed(each)

    judging.append(judge)
    found = {(r.backend, r.case, r.execution): r for r in results(*SIX, jobs=jobs)}
    assert len(found) == len(SIX)
    hit = found.pop((SIX[1].backend, SIX[1].case, SIX[1].execution))
    assert hit.repeated == f"{attempts - 1} left"
    assert hit.of_the_kit == (attempts == 2)
    if hit.of_the_kit:
        assert hit.reason == f"{KIT_ERROR}0 left; this was the second attempt, and in the first 1 left"
    assert {(r.status, r.repeated) for r in found.values()} == {(Status.PASSED, "")}


@pytest.mark.parametrize(
    ("error", "attempts", "answers"),
    [
        (worker_process.ImportKilled("killed"), 1, True),
        (worker_process.ImportKilled("killed"), 2, False),
        (worker_process.WorkerStartError("no process"), 1, True),
        (worker_process.WorkerStartError("no process"), 2, False),
        (BackendNotFound("it raised"), 1, False),
    ],
)
def test_a_worker_that_is_killed_before_the_plan_is_replaced_once_and_what_an_import_raises_is_final(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch, error: Exception, attempts: int, answers: bool
) -> None:
    left = [attempts]

    def describe(self: FakeWorker) -> Described:
        if left[0]:
            left[0] -= 1
            self.close()
            raise error
        return Described(CAPABILITIES)

    monkeypatch.setattr(FakeWorker, "describe", describe)
    runner = Runner()
    if answers:
        assert runner.declared(A, "cpu") is CAPABILITIES
    else:
        with pytest.raises(type(error)):
            runner.declared(A, "cpu")
    assert left == [0]
    runner.close()


def test_a_run_tells_which_case_runs_have_begun(judging: list[Judging]) -> None:
    runner, begun = Runner(), list[Item]()
    runner.begun = begun.append
    for number, _ in enumerate(runner.run(plan(*SIX), SIX), 1):
        assert begun[:number] == SIX[:number]
    runner.close()


def test_what_another_judge_has_spent_is_no_longer_in_the_budget(judging: list[Judging]) -> None:
    (late,) = results(SIX[0], budget_s=9.0, spent_s=9.0)
    assert late.left_out
    (early,) = results(SIX[0], budget_s=9.0, spent_s=1.0)
    assert early.status is Status.PASSED


def test_one_job_uses_the_first_gpu(judging: list[Judging]) -> None:
    results(*SIX, gpus=("g0", "g1"))
    assert {w.gpu for w in FakeWorker.made} == {Gpu("g0")}


def test_there_are_no_more_lanes_than_groups_and_one_job_has_its_lane_here(judging: list[Judging]) -> None:
    seen: set[int] = set()

    def judge(drive: object, described: Described, plan: Plan, each: Item) -> CaseResult:
        seen.add(threading.get_ident())
        return passed(each)

    judging.append(judge)
    for options in ({"jobs": 8, "in_process": True}, {"jobs": 1}):
        assert len(results(*SIX, **options)) == len(SIX)
        assert seen == {threading.get_ident()}, options
    assert ThreadedLane.made == []
    for items, lanes in ((SIX, 4), (SIX[:2], 1), ([], 0)):
        ThreadedLane.made.clear()
        assert len(results(*items, jobs=8)) == len(items)
        assert len(ThreadedLane.made) == lanes
    runner = Runner(apart=True)
    assert len(list(runner.run(plan(*SIX), SIX))) == len(SIX)
    assert len(ThreadedLane.made) == 1
    runner.close()


def test_lanes_that_a_run_has_no_work_for_are_ended_with_their_workers(judging: list[Judging]) -> None:
    """The worker of another backend would keep its memory of the device."""
    runner = Runner(Options(jobs=3))
    runner.plan(asked("torch_native", modes=("decode",)))
    assert FakeWorker.alive == 3
    list(runner.run(plan(*SIX[:2]), SIX[:2]))
    assert [each.closed for each in ThreadedLane.made] == [False, True, True]
    assert FakeWorker.alive == 1
    list(runner.run(plan(*SIX), SIX))
    assert [each.closed for each in ThreadedLane.made] == [False, True, True, False, False]
    runner.close()
    assert all(each.closed for each in ThreadedLane.made)
    assert FakeWorker.alive == 0


def test_what_ends_programs_in_a_lane_ends_the_run(judging: list[Judging]) -> None:
    def judge(drive: object, described: Described, plan: Plan, each: Item) -> CaseResult:
        raise KeyboardInterrupt

    judging.append(judge)
    with pytest.raises(KeyboardInterrupt):
        results(*SIX, jobs=2)


def test_a_generator_that_is_given_up_ends_its_workers_and_the_runner_goes_on(judging: list[Judging]) -> None:
    for jobs in (1, 2):
        runner = Runner(Options(jobs=jobs))
        running = runner.run(plan(*SIX), SIX)
        assert next(running).status is Status.PASSED
        running.close()
        assert len(list(runner.run(plan(*SIX[:2]), SIX[:2]))) == 2
        runner.close()
        assert FakeWorker.alive == 0
        assert list(runner.run(plan(*SIX), SIX)) == [], "once closed it begins nothing"


ENDS: list[tuple[Exception, Status, str]] = [
    (WorkerLost(Status.TIMED_OUT, "no result"), Status.TIMED_OUT, "no result"),
    (WorkerLost(Status.CRASHED, "killed"), Status.CRASHED, "killed"),
    (UsageError("gone"), Status.CRASHED, "gone"),
    (RuntimeError("ours"), Status.CRASHED, f"{KIT_ERROR}RuntimeError: ours\nTraceback"),
]


@pytest.mark.parametrize(("error", "status", "reason"), ENDS, ids=[str(end[2])[:12] for end in ENDS])
@pytest.mark.parametrize("jobs", [1, 2])
def test_whatever_is_raised_costs_one_case_run(
    judging: list[Judging], error: Exception, status: Status, reason: str, jobs: int
) -> None:
    def judge(drive: object, described: Described, plan: Plan, each: Item) -> CaseResult:
        if each.case == X:
            raise error
        return passed(each)

    judging.append(judge)
    for found in results(*SIX, jobs=jobs):
        if found.case == X:
            assert found.status is status
            assert found.reason.startswith(reason)
            assert found.device == ("" if "kit" in reason else "emulated")
        else:
            assert found.status is Status.PASSED


def test_a_worker_that_ended_is_replaced_even_in_the_middle_of_a_case(judging: list[Judging]) -> None:
    def judge(drive: Callable[..., RunRecord], described: Described, plan: Plan, each: Item) -> CaseResult:
        FakeWorker.made[-1].close()
        drive(None)
        return passed(each)

    judging.append(judge)
    assert [r.status for r in results(*SIX[:2])] == [Status.PASSED] * 2
    assert [w.candidate for w in FakeWorker.made] == [A, A, A]


def test_a_lost_context_in_this_process_leaves_the_rest_not_run(judging: list[Judging]) -> None:
    judging.append(lambda drive, described, plan, each: replace(passed(each), status=Status.CRASHED, reason="lost"))
    first, *rest = results(*SIX, in_process=True)
    assert (first.status, first.reason) == (Status.CRASHED, "lost\n  last words")
    assert {(r.status, r.reason) for r in rest} == {
        (Status.NOT_RUN_HERE, f"not run: the device's context was lost in {X}")
    }
    assert [r.status for r in results(*SIX)] == [Status.CRASHED] * len(SIX), "processes are replaced"


def test_a_run_of_another_plan_in_this_process_does_not_begin_after_a_lost_context(judging: list[Judging]) -> None:
    runner = Runner(Options(in_process=True))
    judging.append(lambda drive, described, plan, each: replace(passed(each), status=Status.CRASHED, reason="lost"))
    list(runner.run(plan(SIX[0]), SIX[:1]))
    judging.append(lambda drive, described, plan, each: passed(each))
    assert [r.status for r in runner.run(plan(SIX[1]), SIX[1:2])] == [Status.NOT_RUN_HERE]


def test_a_line_of_capabilities_or_why_it_cannot_be_imported(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    def declared(self: Runner, candidate: Candidate, device: str) -> Capabilities:
        if candidate.spec == "m:B":
            raise UsageError("no such thing")
        return CAPABILITIES

    monkeypatch.setattr(Runner, "declared", declared)
    (line, why), refused = Runner().capabilities_lines(["m:A", "m:B"], "cpu")
    assert "decode" in line
    assert (why, refused) == ("", ("", "no such thing"))


def driving(drive: Callable[..., RunRecord], described: Described, plan: Plan, each: Item) -> CaseResult:
    drive(RunCase(each.case, Execution(each.execution)))
    return passed(each)


def test_what_the_same_backend_is_to_do_next_is_begun_while_it_is_evaluated(judging: list[Judging]) -> None:
    judging.append(driving)
    results(*SIX)
    EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
    following = [RunCase(X, GRAPH), RunCase(Y, EAGER), RunCase(Y, GRAPH)]
    assert FakeWorker.begun == following * 2, "nothing after the last of a backend"
    FakeWorker.begun.clear()
    results(*SIX, jobs=2)
    assert {request.case: request for request in FakeWorker.begun} == {  # type: ignore[attr-defined]
        X: RunCase(X, GRAPH),
        Y: RunCase(Y, GRAPH),
    }, "another lane may take the next group"
    FakeWorker.begun.clear()
    results(SIX[0], SIX[0])
    assert FakeWorker.begun == [RunCase(X, EAGER)], "the same again is a drive of its own"


def test_questions_of_the_diagnosis_begin_nothing(judging: list[Judging]) -> None:
    def judge(drive: Callable[..., RunRecord], described: Described, plan: Plan, each: Item) -> CaseResult:
        drive(Rerun(None))  # type: ignore[arg-type]
        return passed(each)

    judging.append(judge)
    results(*SIX)
    assert FakeWorker.begun == []


def test_a_lane_takes_its_next_group_early_while_there_are_more_than_lanes() -> None:
    def order(lanes: int) -> list[tuple[str, str | None]]:
        groups = groups_of([item("m:A", name, execution) for name in "wxyz" for execution in ("eager", "graph")])
        return [(now.case + now.execution[0], after and after.case + after.execution[0])
                for now, after in Waiting(groups, lanes, early=False).of_lane()]  # fmt: skip

    every = [f"{name}{execution}" for name in "wxyz" for execution in "eg"]
    assert order(1) == list(zip(every, [*every[1:], None], strict=True))
    # After the first group three wait, after the second two: as many as lanes are left to whoever is free.
    assert [after for _, after in order(2)] == ["wg", "xe", "xg", None, "yg", None, "zg", None]
    assert [after for _, after in order(3)] == ["wg", None, "xg", None, "yg", None, "zg", None]
    assert list(Waiting([], 1, early=False).of_lane()) == []


def test_a_run_that_is_given_up_begins_nothing_more_and_the_next_run_is_whole(judging: list[Judging]) -> None:
    evaluated: list[Item] = []
    go_on = threading.Event()

    def slow(drive: object, described: object, plan: object, item: Item) -> CaseResult:
        evaluated.append(item)
        assert item.case == case(0) or go_on.wait(20)
        return passed(item)

    judging.append(slow)
    many = [item("m:A", case(number)) for number in range(40)]
    runner = Runner(Options(jobs=2))
    found = runner.run(plan(*many), many)
    next(found)
    found.close()
    assert [each.closed for each in ThreadedLane.made] == [True, True]
    go_on.set()
    assert len(evaluated) <= 3, "the first, and one that each lane was busy with"
    assert len(list(runner.run(plan(*SIX), SIX))) == len(SIX)
    runner.close()


def test_where_nothing_is_begun_ahead_a_lane_gets_its_next_case_run_when_the_caller_asks_for_it(
    judging: list[Judging],
) -> None:
    """Whoever gives a run up at its first failure keeps the lane."""
    judging.append(driving)
    runner = Runner(apart=True)
    found = runner.run(plan(*SIX), SIX, ahead=False)
    next(found)
    (only,) = ThreadedLane.made
    assert [work.item for work in only.work] == SIX[:1]
    next(found)
    assert [work.item for work in only.work] == SIX[:2]
    found.close()
    assert not only.closed
    assert FakeWorker.begun == []
    assert len(list(runner.run(plan(*SIX), SIX))) == len(SIX)
    assert ThreadedLane.made == [only]
    runner.close()


def test_a_worker_that_dies_over_what_was_begun_ahead_is_asked_again_elsewhere(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = WorkerLost(Status.CRASHED, "killed")
    drives: list[FakeWorker] = []

    def drive(self: FakeWorker, request: object) -> RunRecord:
        drives.append(self)
        if len(drives) == 2:
            self.close()
            raise lost
        return RunRecord()

    monkeypatch.setattr(FakeWorker, "drive", drive)
    judging.append(driving)
    lost.of_another = True
    assert [r.status for r in results(*SIX[:3])] == [Status.PASSED] * 3
    assert (len(drives), len(FakeWorker.made)) == (4, 2)
    assert len(FakeWorker.begun) == 1, "what killed it is not begun ahead a second time"
    drives.clear()
    lost.of_another = False
    assert [r.status for r in results(*SIX[:3])] == [Status.PASSED, Status.CRASHED, Status.PASSED]


def test_the_judge_is_a_process_unless_it_was_asked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(judge_process, "JudgeProcess", lambda *args: made.append(args))
    judge_for(Options(jobs=14), "cpu")
    assert made == [(Options(jobs=14), "cpu")]
    assert isinstance(judge_for(Options(in_process=True)), Runner)
    assert len(made) == 1


# Words about how a process ended.


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended itself with exit code 0"),
        (3, "ended itself with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-200, "was killed by signal 200"),
    ],
)
def test_how_a_process_ended_is_said_in_words(code: int, words: str) -> None:
    assert ending(code) == words


def test_of_many_lines_the_last_dozen_are_kept() -> None:
    lines = [f"line {i}" for i in range(20)]
    assert _last_lines(lines) == lines[8:]
    assert _last_lines(lines[:3]) == lines[:3]


def test_of_a_stack_dump_the_innermost_frames_of_the_thread_that_matters_are_kept() -> None:
    def frames(name: str, count: int) -> list[str]:
        return [f'  File "{name}.py", line {i} in f' for i in range(count)]

    other = ["Thread 0x1 (most recent call first):", *frames("other", 3)]
    current = ["Current thread 0x2 (most recent call first):", *frames("mine", 3), "Extension modules: x"]
    printed = [f"printed {i}" for i in range(12)]
    assert _last_lines(["said", "Fatal Python error", *other, *current]) == [
        "said",
        "Fatal Python error",
        *frames("mine", 3),
    ]
    assert _last_lines([*printed, *current]) == [*printed[3:], *frames("mine", 3)]
    timer = ["Timeout (0:00:01)!", *other, "Thread 0x3 (most recent call first):", *frames("main", 9)]
    assert _last_lines(["said", *timer]) == ["said", *frames("main", 5)], "a timer's dump has the main thread last"
    kit = [
        '  File "/x/attn_testkit/running/case_runs/worker_main.py", line 1 in serve',
        '  File "<string>", line 1 in <module>',
        '  File "/lib/multiprocessing/spawn.py", line 1 in main',
    ]
    assert _last_lines([current[0], *kit, *frames("mine", 2)]) == frames("mine", 2)


def test_of_very_much_that_was_printed_only_the_end_is_read(tmp_path) -> None:
    path = tmp_path / "words"
    path.write_bytes(b"first\n" + b"x" * MOST_BYTES)
    assert _tail(str(path), 0) == "x" * MOST_BYTES
    path.write_bytes(b"before" + b"x" * (MOST_BYTES - 1) + b"\xff")
    assert _tail(str(path), 6) == "x" * (MOST_BYTES - 1) + "\N{REPLACEMENT CHARACTER}"
    path.write_bytes(b"asked before\nasked now\n")
    assert _tail(str(path), 13) == "asked now\n"
    assert _tail(str(tmp_path / "none"), 0) == ""


def test_of_a_printed_traceback_the_authors_frames_and_the_reason_are_kept() -> None:
    lines = """before
Process Fork-3:
Traceback (most recent call last):
  File "/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
    self.run()
  File "/x/attn_testkit/running/processes/child.py", line 170, in _run
    serve(connection, *arguments)
  File "/x/site-packages/attn_testkit/runner_modes/eager.py", line 50, in run_eager
    harness.backend.init_forward_metadata(batch)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/mine.py", line 7, in init_forward_metadata
    self.handle = load("libkernels.so")
                  ^^^^^~~~~~~~~~~~~~~~~~
OSError: libkernels.so: cannot open shared object file""".splitlines()
    assert _last_lines(lines) == [
        "before",
        "Traceback (most recent call last):",
        '  File "/home/me/mine.py", line 7, in init_forward_metadata',
        '    self.handle = load("libkernels.so")',
        "OSError: libkernels.so: cannot open shared object file",
    ]


# The worker's own side, in this process.

SPEC = "attn_testkit.backends.torch_native:TorchNativeBackend"


def state_of(monkeypatch: pytest.MonkeyPatch, *found: list[str]) -> list[object]:
    """What is found changed, one answer after another; and what was restored."""
    answers, restored = list(found), list[object]()

    def unchanged(before: object) -> bool:
        if answers and answers[0]:
            return False
        del answers[:1]
        return True

    monkeypatch.setattr(worker_main, "unchanged", unchanged)
    monkeypatch.setattr(worker_main, "changes", lambda before, skip=(): answers.pop(0) if answers else [])
    monkeypatch.setattr(worker_main, "restore", lambda before, skip=(): restored.append((before, skip)))
    return restored


def test_it_is_asked_for_all_that_a_process_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_main, "run_case", lambda *_: RunRecord())
    monkeypatch.setattr(
        lane, "evaluate_item", lambda drive, described, plan, asked: driving(drive, described, plan, asked.item)
    )
    runner = Runner(Options(in_process=True))
    items = [Item(SPEC, "decode", "eager", case) for case in (X, Y)]
    found = list(runner.run(replace(plan(*items), candidates=(Candidate(SPEC),)), items))
    assert [(result.status, result.reason) for result in found] == [(Status.PASSED, "")] * 2
    assert {name for name in vars(worker_process.Worker) if not name.startswith("_")} - {"pid"} <= set(
        dir(LocalWorker)
    ) | {"ended"}


def test_what_importing_changes_is_described_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = state_of(monkeypatch, ["a"])
    found = LocalWorker(Candidate(SPEC), "cpu")
    assert replace(found.describe(), source={}) == Described(found.backend_class.capabilities, ("a",))
    assert len(restored) == 1
    restored = state_of(monkeypatch, [])
    assert LocalWorker(Candidate(SPEC), "cpu").describe().changed == ()
    assert restored == []


def test_what_a_drive_changes_is_added_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = LocalWorker(candidate_for(SPEC), "cpu")
    # Another test may have imported FlashInfer, whose launches are not counted.
    monkeypatch.setattr("attn_testkit.watches.launches._NOT_COUNTED", ())
    monkeypatch.setattr(worker_main, "run_case", lambda *_: RunRecord(changed=("a",), stage=5))
    restored = state_of(monkeypatch, [], ["b"])
    assert found.drive("any") == RunRecord(changed=("a",), stage=5, launches=0)  # type: ignore[arg-type]
    assert restored == []
    assert found.drive("any") == RunRecord(changed=("a", "b"), stage=5, launches=0)  # type: ignore[arg-type]
    assert len(restored) == 1
    assert (found.ended, found.last_words()) == (False, "")
    found.close()
    assert found.ended


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(1), KeyboardInterrupt(), MemoryError()])
def test_what_is_raised_in_a_changed_process_is_the_backends_and_else_the_kits(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def drive(*_: object) -> RunRecord:
        raise error

    found = LocalWorker(Candidate(SPEC), "cpu")
    monkeypatch.setattr(worker_main, "run_case", drive)
    state_of(monkeypatch, [], ["b"])
    with pytest.raises(type(error)):
        found.drive("any")  # type: ignore[arg-type]
    if isinstance(error, (KeyboardInterrupt, MemoryError)):
        with pytest.raises(type(error)):
            found.drive("any")  # type: ignore[arg-type]
    else:
        reported = f"and then {type(error).__name__} was raised: {error}"
        assert found.drive("any") == RunRecord(changed=("b", reported))  # type: ignore[arg-type]


def test_survivors_are_set_aside_at_the_first_the_fourth_and_every_sixteenth_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, settled = LocalWorker(Candidate(SPEC), "cpu"), list[int]()
    state_of(monkeypatch)
    monkeypatch.setattr(worker_main, "run_case", lambda *_: RunRecord())
    monkeypatch.setattr(worker_main, "settle", lambda: settled.append(found._cases))
    for number in range(33):
        for execution in Execution:
            found.drive(RunCase(f"case {number}", execution))
    assert settled == [1, 4, 16, 32]


def failing(drive: Callable[..., RunRecord], described: Described, plan: Plan, each: Item) -> CaseResult:
    drive(RunCase(each.case, Execution(each.execution)))
    return replace(passed(each), status=Status.FAILED, findings=(Finding("matches-oracle", "wrong"),))


@pytest.mark.parametrize("jobs", [1, 2])
def test_failures_of_one_kind_are_asked_about_in_a_fresh_process_until_it_is_known(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    judging.append(failing)
    asked: list[str] = []

    def wrong_anyway(self: Lane, before: object, plan: object, each: CaseRun, *more: object) -> bool:
        asked.append(each.item.case)
        return True

    monkeypatch.setattr(Lane, "_fails_afresh", wrong_anyway)
    results(*(item("m:A", case(i)) for i in range(12)), jobs=jobs)
    if jobs == 1:
        assert asked == [case(1), case(2)], "nothing came before the first; what two have shown holds for the rest"
    else:
        assert 2 <= len(asked) <= 3, "lanes know what each other has been shown, but for what both are busy with"


@pytest.mark.parametrize("error", [RuntimeError("of the harness"), WorkerLost(Status.CRASHED, "killed")])
def test_what_cannot_be_driven_again_in_a_fresh_process_says_nothing(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def drive(self: FakeWorker, request: object) -> RunRecord:
        raise error

    monkeypatch.setattr(FakeWorker, "drive", drive)
    before, wanted = [RunCase(X, Execution.EAGER)], CaseRun(item("m:A", Y), parse_case(Y), Execution.EAGER)
    assert Lane(Options())._fails_afresh(before, plan(), wanted, A) is None
    assert [w.ended for w in FakeWorker.made] == [True]


def test_every_worker_drives_first_what_every_process_is_to_drive_first(
    judging: list[Judging], monkeypatch: pytest.MonkeyPatch
) -> None:
    record: list[object] = []

    def drive(self: FakeWorker, request: object) -> RunRecord:
        record.append(request)
        return RunRecord()

    monkeypatch.setattr(FakeWorker, "drive", drive)
    judging.append(driving)
    results(item("m:A", X), item("m:A", Y), item("m:B", X), after=(f"graph:{Z}",))
    first, x, y = (RunCase(*of) for of in ((Z, Execution.GRAPH), (X, Execution.EAGER), (Y, Execution.EAGER)))
    assert record == [first, x, y, first, x]


def test_importing_may_take_a_minute_or_as_long_as_a_case_run() -> None:
    assert (worker_process.import_seconds(7.0), worker_process.import_seconds(61.0)) == (60.0, 61.0)


def test_closing_a_lane_waits_for_a_worker_that_a_thread_is_ending_and_ends_what_is_made_meanwhile(
    judging: list[Judging],
) -> None:
    closed = Lane(Options())
    closed.close()
    closed.start(A, "cpu")
    assert FakeWorker.made[-1].ended, "started for a lane that was closed meanwhile"
    slot = Lane(Options())._slot
    worker = slot.of(A, "cpu")
    seen: list[list[Any]] = []
    worker.close = lambda: seen.append(list(slot._open))  # type: ignore[method-assign]
    slot.of(B, "cpu")
    assert seen == [[worker]]
    assert slot._open == [FakeWorker.made[-1]]


def test_a_process_goes_from_no_grad_to_inference_mode_and_not_back(judging: list[Judging]) -> None:
    judging.append(driving)
    by_mode = {parse_case(case(n)).inference_mode: case(n) for n in range(9)}
    results(item("m:A", by_mode[False]), item("m:A", by_mode[True]))
    assert len(FakeWorker.made) == 1
    assert FakeWorker.begun == [RunCase(by_mode[True], Execution.EAGER)]


def test_of_a_call_that_takes_long_a_sign_of_life_comes_before_each_drive_but_the_first(judging: list[Judging]) -> None:
    signs: list[int] = []

    def judge(drive: Callable[..., RunRecord], described: Described, plan: Plan, each: Item) -> CaseResult:
        drive(RunCase(each.case, Execution(each.execution)))
        signs.append(-1)
        drive(Rerun(None))  # type: ignore[arg-type]
        drive(Rerun(None))  # type: ignore[arg-type]
        return passed(each)

    judging.append(judge)
    here = Lane(Options(after=(f"eager:{Z}",)), alive=lambda: signs.append(1))
    here.run(plan(), Work(SIX[0], None, Afresh()))
    assert signs == [1, 1, -1, 1, 1], "a worker's start, what it drives first; then each question of the diagnosis"
