"""The places that adversarial backends found open, each by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attn_testkit.runner_modes.errors import ContractError, RunError, blame, no_mode_left
from torch.overrides import TorchFunctionMode

from attn_testkit.checks.capabilities import refuses_undeclared
from attn_testkit.graphs.host_syncs import host_syncs_forbidden
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.processes import worker_process
from attn_testkit.running.processes.worker_process import Worker, WorkerLost
from attn_testkit_corpus.audit import Settings
from attn_testkit_corpus.audit.adversarial import FrontEnd, run_adversarial
from attn_testkit_corpus.audit.verdicts import Task
from cuda_on_cpu import emulated_cuda


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_whoever_plans_cannot_switch_the_report_of_host_syncs_off() -> None:
    with emulated_cuda():
        setter = torch.cuda.set_sync_debug_mode
        with host_syncs_forbidden():
            for value in ("default", 0, "error"):
                with pytest.raises(RuntimeError, match="synchronizing operations would go unseen"):
                    torch.cuda.set_sync_debug_mode(value)
            assert torch.cuda.get_sync_debug_mode() == 2
        assert torch.cuda.get_sync_debug_mode() == 0
        assert torch.cuda.set_sync_debug_mode is setter
        with host_syncs_forbidden(False):
            torch.cuda.set_sync_debug_mode("default")


def test_a_mode_that_is_left_entered_is_the_backends_mistake_and_named() -> None:
    mode = Mode()
    with pytest.raises(RunError) as raised, blame("plan", "a label"):
        mode.__enter__()
    mode.__exit__(None, None, None)
    assert isinstance(raised.value.__cause__, ContractError)
    assert str(raised.value.__cause__) == "a torch mode was entered and not left: Mode"
    with blame("plan"), Mode():
        torch.zeros(1)
    with Mode(), no_mode_left():
        torch.zeros(1)


def test_the_oracle_answers_nobody_in_a_process_that_runs_a_backend() -> None:
    code = """
import gc
from attn_testkit.families.softmax import answer, attention
from attn_testkit.families.table import FAMILIES
from attn_testkit.families import expected as expect
from attn_testkit.running.hygiene.oracle_sealed import seal_oracle
held = attention.attend, expect.expect, expect._answer.__wrapped__, answer.attend_with_limit
held += tuple(family.answer for family in FAMILIES.values())
seal_oracle()
for function in (*held, attention.attend):
    try:
        function(None, None)
    except RuntimeError as error:
        assert "answers only the judge" in str(error)
    else:
        raise SystemExit(f"{function} answered")
from attn_testkit.cases.case import parse_case
assert FAMILIES["softmax"].layers(parse_case("decode-mha2-d64-bf16-p16-k5-shuffled-gauss-b1prod"))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capabilities_are_asked_of_nobody_who_could_answer_otherwise_now(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_testkit.runner_modes.harness import context_for

    from attn_testkit.cases.case import parse_case
    from attn_testkit.examples import MinimalBackend
    from attn_testkit.steps.data import make_layers
    from attn_testkit.steps.schedule import make_schedule
    from attn_testkit_corpus.faults.adversarial.catalogue import CASE

    class TakesAnything(MinimalBackend):
        capabilities = MinimalBackend.capabilities

        def __init__(self, context: object) -> None:
            """Anything."""

    told = MinimalBackend.capabilities.with_changes(eager={"decode"}, graph=(), bounds={"max_topk": 0})
    schedule = make_schedule(parse_case(CASE))
    context = context_for([schedule], torch.device("cpu"), make_layers(schedule.case))
    (finding,) = refuses_undeclared(TakesAnything, schedule, context, told)
    assert finding.check == "refuses-undeclared"


class Answers:
    """In the place of a child: says what it is given."""

    ended = False

    def __init__(self, *said: object) -> None:
        self.said, self.told = list(said), list[tuple[int, object]]()

    def tell(self, message: tuple[int, object], seconds: float) -> None:
        self.told.append(message)

    def answer(self) -> object:
        answer = self.said.pop(0)
        return (self.told[-1][0], answer) if isinstance(answer, worker_process.RunRecord) else answer

    def printed(self) -> str:
        return ""

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        self.ended = True

    def spoke_for_itself(self, what: str) -> Exception:
        self.ended = True
        return worker_process.ChildLost(worker_process.Status.CRASHED, f"the process spoke for itself: {what}")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (worker_process.RunRecord(), ""),
        ((7, worker_process.RunRecord()), "it sent an answer to another question"),
        (("7", worker_process.RunRecord()), "it sent an answer to another question"),
        (7, "it sent a int, which is not an answer"),
        ((1, 2, 3), "it sent a tuple, which is not an answer"),
        (worker_process.RunRecord(stage=6), "it sent a run record with the unknown stage 6"),
        (worker_process.RunRecord(stage=-1), "it sent a run record with the unknown stage -1"),
        (worker_process.RunRecord(stage=5), ""),
    ],
)
def test_an_answer_has_the_number_of_its_question(said: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Answers(said)
    monkeypatch.setattr(worker_process, "Child", lambda *_: child)
    worker = Worker(Candidate("any"), "cpu", 1.0)
    worker.described = object()  # type: ignore[assignment]
    request = worker_process.RunCase("c", "eager")  # type: ignore[arg-type]
    if not reason:
        assert worker.drive(request) == said
        return
    with pytest.raises(WorkerLost, match=reason):
        worker.drive(request)
    assert worker.ended


def test_a_worker_is_not_reported_by_its_command_line_from_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/somewhere/pytest-of-somebody")
    front_end = FrontEnd(Settings(device="cpu", timeout_s=60.0))
    try:
        verdict = run_adversarial(Task("adversarial", "right-where-it-is-looked-at"), front_end)
    finally:
        front_end.close()
    assert verdict.ending.startswith("failed: ")
