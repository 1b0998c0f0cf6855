"""Each kind of process of the kit is killed in the middle of a run: no result is lost, none comes twice, nothing stays.

The run is real; the moment is that of a given result, and not of a clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alive import alive

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

from random_kills import JUDGE, LANE, LANES_SERVER, SERVER, TRACKER, WORKER, kinds

from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.running.planning.request import Options, Plan, Request
from attn_testkit.running.processes import judge_process
from attn_testkit.running.processes.judge_process import MOST_DEATHS, JudgeError, JudgeProcess

pytestmark = pytest.mark.cold
REQUEST = Request(("torch_native",), modes=("decode",), executions=("eager",), device="cpu")
TOTAL = 10
AFTER = 3
"""Number of the result after which a process is killed."""
ONE_LANE = {JUDGE: 1, TRACKER: 1, SERVER: 1, WORKER: 1}
TWO_LANES = {JUDGE: 1, TRACKER: 1, SERVER: 1, LANE: 2, LANES_SERVER: 2, WORKER: 2}


@contextlib.contextmanager
def judge(jobs: int = 1) -> Iterator[JudgeProcess]:
    with contextlib.closing(JudgeProcess(Options(jobs=jobs), "cpu")) as made:
        yield made


def tree(judge: JudgeProcess) -> dict[int, str]:
    """Kind of each process of a judge."""
    return {judge._process.pid: JUDGE, **kinds(os.getpid(), judge._process.pid)}


def kill(judge: JudgeProcess, kind: str) -> int:
    """Kill one process of a kind."""
    pid = next(pid for pid, each in tree(judge).items() if each == kind)
    os.kill(pid, signal.SIGKILL)
    while alive(pid):
        time.sleep(0.001)
    return pid


def followed(judge: JudgeProcess, plan: Plan, killing: Callable[[], object]) -> list[CaseResult]:
    results = []
    for number, result in enumerate(judge.run(plan, plan.items[:TOTAL]), 1):
        results.append(result)
        if number == AFTER:
            killing()
    return results


def none_is_left(pids: set[int]) -> bool:
    until = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("jobs", "kind"), [(1, JUDGE), (1, TRACKER), *((2, kind) for kind in TWO_LANES if kind not in (JUDGE, TRACKER))]
)
def test_a_process_that_is_killed_costs_no_result_but_that_of_its_own_worker(jobs: int, kind: str) -> None:
    with judge(jobs) as one:
        plan = one.plan(REQUEST)
        seen: set[int] = set()

        def killing() -> None:
            there = tree(one)
            assert Counter(there.values()) == (TWO_LANES if jobs == 2 else ONE_LANE)
            seen.update(there)
            kill(one, kind)

        results = followed(one, plan, killing)
        seen.update(tree(one))
    assert Counter(result.case for result in results) == Counter(item.case for item in plan.items[:TOTAL])
    statuses = Counter(result.status for result in results)
    crashed = int(kind == WORKER)
    assert statuses == {Status.PASSED: TOTAL - crashed, **({Status.CRASHED: 1} if crashed else {})}, results
    assert not any(result.of_the_kit for result in results)
    repeated = [result.repeated for result in results if result.repeated]
    if kind == JUDGE:
        assert 1 <= len(repeated) <= jobs
        assert set(repeated) == {"the judge's process was killed by SIGKILL"}
    elif kind == LANE:
        assert [how.splitlines()[0] for how in repeated] == [
            "the lane, which evaluates results of its worker: the process was killed by SIGKILL"
        ]
    else:
        assert not repeated
    assert none_is_left(seen)


def test_a_judge_that_is_killed_while_it_plans_is_asked_again() -> None:
    with judge() as one:
        one._send(("plan", REQUEST))
        kill(one, JUDGE)
        assert len(one.plan(REQUEST).items) >= TOTAL


def test_a_process_that_workers_are_forked_from_is_made_again_and_its_workers_are_ended() -> None:
    """What is forked from it lives on, and its exit code is known to nobody."""
    with judge() as one:
        plan = one.plan(REQUEST)
        before = set(tree(one))
        kill(one, SERVER)
        assert [result.status for result in one.run(plan, plan.items[:2])] == [Status.PASSED] * 2
    assert none_is_left(before)


def test_a_case_run_in_which_two_judges_die_is_an_error_of_the_kit_and_the_rest_runs() -> None:
    with judge() as one:
        plan = one.plan(REQUEST)
        begun = one._receive
        killed: list[str] = []
        in_flight: dict[int | None, set[str]] = {}

        def receive(kind: str, running: list[object] | None = None) -> object:
            # Whenever the second case-run is the one that runs, its judge dies.
            connection = one._connection

            class Watched:
                def recv(self) -> tuple[str, Any]:
                    found: tuple[str, Any] = connection.recv()
                    # A judge begins the next case-run before it sends the result of this one.
                    mine = in_flight.setdefault(one._process.pid, set())
                    if found[0] == "begun":
                        mine.add(found[1].case)
                    elif found[0] == "result" and found[1] is not None:
                        mine.discard(found[1].case)
                    if found[0] == "begun" and found[1].case == plan.items[1].case:
                        killed.append(JUDGE)
                        os.kill(one._process.pid, signal.SIGKILL)
                    return found

                def close(self) -> None:
                    connection.close()

                def send(self, message: object) -> None:
                    connection.send(message)

            one._connection = Watched()  # type: ignore[assignment]
            try:
                return begun(kind, running)  # type: ignore[arg-type]
            finally:
                one._connection = connection

        one._receive = receive  # type: ignore[method-assign,assignment]
        results = {result.case: result for result in one.run(plan, plan.items[:4])}
    assert len(killed) == 2
    assert len(results) == 4
    lost = results[plan.items[1].case]
    assert lost.of_the_kit
    assert lost.reason.count("the judge's process was killed by SIGKILL") == 2
    assert "this was the second attempt" in lost.reason
    first, second, *_ = in_flight.values()
    assert {case for case, result in results.items() if result.of_the_kit} == first & second
    assert {result.status for result in results.values() if not result.of_the_kit} == {Status.PASSED}


def test_judges_that_die_again_and_again_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with judge() as one:
        plan = one.plan(REQUEST)
        started: list[int] = []
        fresh = judge_process._fresh

        def doomed(device: str) -> object:
            found = fresh(device)
            started.append(found[1].pid)
            found[1].kill()
            return found

        monkeypatch.setattr(judge_process, "_fresh", doomed)
        kill(one, JUDGE)
        with pytest.raises(JudgeError, match=rf"SIGKILL, as {MOST_DEATHS - 1} before it did, without a result between"):
            list(one.run(plan, plan.items[:4]))
        assert len(started) == MOST_DEATHS - 1
        with pytest.raises(JudgeError):
            one.plan(REQUEST)
        assert len(started) == MOST_DEATHS - 1, "a judge that was closed starts no other"
