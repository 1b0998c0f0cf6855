"""Judging in a process beside the worker: it asks for drives, and gives what judging here gives."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attn_testkit.runner_modes.messages import Described, DriveCase, Driven, Rerun

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import AttentionBackend, AttentionLayer
from attn_testkit.results import CaseResult, Status
from attn_testkit.running.case_runs.judge import judge_item
from attn_testkit.running.case_runs.judging_process import JudgingProcess
from attn_testkit.running.case_runs.worker_main import LocalWorker
from attn_testkit.running.planning.candidate import candidate_for
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Plan, Request
from attn_testkit.running.processes.worker_process import WorkerLost

CASE = "decode-gqa2x2-d32-fp32-p4-k9.6-shuffled-gauss-b2prod"
SPEC = "attn_testkit.backends.torch_native:TorchNativeBackend"
ITEM = Item(SPEC, "decode", "eager", CASE)


class TwiceTheScale(TorchNativeBackend):
    def _logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return 2 * super()._logits(rows, keys, layer)


@pytest.fixture
def judging() -> Iterator[JudgingProcess]:
    with contextlib.closing(JudgingProcess()) as process:
        yield process


def worker_of(backend: type[AttentionBackend]) -> LocalWorker:
    # Made in the test: it would notice the variable that pytest sets from fixture to test.
    return LocalWorker(candidate_for(backend, in_process=True), "cpu")


def judged(judging: JudgingProcess, plan: Plan) -> CaseResult:
    worker = worker_of(TorchNativeBackend)
    return judging.judge(worker.drive, worker.described, plan, ITEM)


@pytest.fixture(scope="module")
def plan() -> Plan:
    request = Request((SPEC,), executions=("eager",), device="cpu", cases=(CASE,))
    return plan_run(request, lambda _: TorchNativeBackend.capabilities)


def without_times(result: CaseResult) -> CaseResult:
    return replace(result, seconds={})


def test_a_right_and_a_wrong_backend_are_judged_as_they_are_here(judging: JudgingProcess, plan: Plan) -> None:
    asked: list[DriveCase | Rerun] = []
    for backend, status in ((TorchNativeBackend, Status.PASSED), (TwiceTheScale, Status.FAILED)):
        worker = worker_of(backend)

        def drive(request: DriveCase | Rerun, worker: LocalWorker = worker) -> Driven:
            asked.append(request)
            return worker.drive(request)

        beside = judging.judge(drive, worker.described, plan, ITEM)
        here = judge_item(worker.drive, worker.described, plan, ITEM)
        assert beside.status is status, beside.findings
        assert without_times(beside) == without_times(here)
        assert beside.seconds.keys() == here.seconds.keys()
    assert any(isinstance(request, Rerun) for request in asked), "the diagnosis asks for more"


def test_a_worker_that_is_lost_is_lost_for_whoever_asked(judging: JudgingProcess, plan: Plan) -> None:
    def lost(request: DriveCase | Rerun) -> Driven:
        raise WorkerLost(Status.TIMED_OUT, "no result after 3 s")

    with pytest.raises(WorkerLost, match="no result after 3 s") as caught:
        judging.judge(lost, Described(TorchNativeBackend.capabilities), plan, ITEM)
    assert caught.value.status is Status.TIMED_OUT
    assert judged(judging, plan).status is Status.PASSED


def test_an_error_in_a_drive_is_raised_and_the_next_case_run_is_judged_afresh(
    judging: JudgingProcess, plan: Plan
) -> None:
    def broken(request: DriveCase | Rerun) -> Driven:
        raise RuntimeError("the worker failed")

    with pytest.raises(RuntimeError, match="the worker failed"):
        judging.judge(broken, Described(TorchNativeBackend.capabilities), plan, ITEM)
    assert judged(judging, plan).status is Status.PASSED


def test_an_error_in_judging_is_told_with_its_place(judging: JudgingProcess, plan: Plan) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)no case.*parse_case"):
        judging.judge(
            lambda request: Driven(), Described(TorchNativeBackend.capabilities), plan, replace(ITEM, case="no case")
        )
    assert judged(judging, plan).status is Status.PASSED


def test_a_process_that_is_killed_while_it_judges_costs_one_verdict(judging: JudgingProcess, plan: Plan) -> None:
    def killing(request: DriveCase | Rerun) -> Driven:
        assert judging._child is not None
        os.kill(judging._child.pid, signal.SIGKILL)
        return Driven()

    with pytest.raises(RuntimeError, match="judging: the process was killed by SIGKILL"):
        judging.judge(killing, Described(TorchNativeBackend.capabilities), plan, ITEM)
    assert judged(judging, plan).status is Status.PASSED
