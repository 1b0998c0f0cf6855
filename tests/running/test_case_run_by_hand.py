"""What a drive of a case runs, in which order and on which instances; harness and modes are fakes that take notes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace as Of
from typing import Any

import pytest
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.graphs import GraphRun
from attn_testkit.runner_modes.memory_use import MemoryUse
from attn_testkit.runner_modes.messages import RunCase, RunRecord

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Stage
from attn_testkit.contract import Execution, Unsupported
from attn_testkit.running.case_runs import case_run
from attn_testkit.running.case_runs.case_run import _CaseRun, with_other_requests
from attn_testkit.steps.schedule import make_schedule

PLAIN = "decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod"
MIXED = "decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod-multi_mode"
HERE: Any = Of(device="a device")


class Notes:
    """Harnesses that were made, eager steps, and graph drives."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.eager: list[tuple[Any, str, str]] = []
        self.beside: list[Any] = []
        self.graphs: list[Any] = []
        self.error: BaseException | None = None

    def harness(self, backend_class: Any, schedules: Any, device: Any, *, declared: Any = None) -> Any:
        if self.error:
            raise self.error
        self.made.append(
            Of(schedules=list(schedules), device=device, backend=None, context=None, compiled=[], memory=MemoryUse())
        )
        return self.made[-1]

    def run_eager(
        self,
        harness: Any,
        schedule: Any,
        step: Any,
        clock: Any,
        *,
        label: str = "",
        ran_before: str = "",
        between: Any = None,
    ) -> Any:
        self.eager.append((step, label, ran_before))
        self.beside.append(between)
        return self.seen(schedule, step, label, ran_before)

    def run_graphs(self, harness: Any, schedules: Any, clock: Any, *, co_resident: Any = None) -> GraphRun:
        self.graphs.append((harness, list(schedules), co_resident))
        return GraphRun((), fill=1)

    @staticmethod
    def seen(schedule: Any, step: Any, label: str, ran_before: str) -> Any:
        return Of(
            schedule=schedule,
            step=step,
            label=label,
            ran_before=ran_before,
            copies=object(),
            damaged=(),
            replay=False,
            padded=0,
            eager_run=None,
        )


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    taken = Notes()
    monkeypatch.setattr(case_run, "ServerHarness", taken.harness)
    monkeypatch.setattr(case_run, "run_eager", taken.run_eager)
    monkeypatch.setattr(case_run, "run_graphs", taken.run_graphs)
    monkeypatch.setattr(case_run, "kernels_of", lambda backend: "fake")
    monkeypatch.setattr(case_run, "refuses_undeclared", lambda *_: ["a finding"])
    return taken


def setup_of(schedules: list[Any], backend: type[TorchNativeBackend] = TorchNativeBackend) -> _CaseRun:
    return _CaseRun(schedules, backend.capabilities)


def test_beside_a_mixed_case_another_instance_with_other_heads_runs_and_beside_no_other(notes: Notes) -> None:
    mixed = [make_schedule(parse_case(name)) for name in (MIXED, PLAIN)]
    case_run._run_graph(TorchNativeBackend, setup_of(mixed), HERE)
    own, co_resident = notes.made
    ((_, record, (of_co_resident, runs)),) = notes.graphs
    assert (own.schedules, record, of_co_resident) == (mixed, mixed, co_resident)
    assert co_resident.schedules == [runs]
    assert (runs.case.mode, runs.case.heads.q_heads) == (mixed[0].case.mode, 2), "a draft model has other heads"
    assert (mixed[0].case.page_size, runs.case.page_size) == (4, 1), "and other pages"
    assert {each.device for each in notes.made} == {"a device"}
    case_run._run_graph(TorchNativeBackend, setup_of(mixed[1:]), HERE)
    assert len(notes.made) == 3
    assert notes.graphs[-1] == (notes.made[-1], mixed[1:], None)


@pytest.mark.parametrize("invariant", [True, False])
def test_an_eager_step_comes_again_at_once_then_another_one_and_then_requests_in_other_company(
    notes: Notes, invariant: bool
) -> None:
    class Backend(TorchNativeBackend):
        capabilities = TorchNativeBackend.capabilities.with_changes(promises={"batch_invariant": invariant})

    case = parse_case(PLAIN)
    schedule = make_schedule(case)
    drive = setup_of([schedule], Backend)
    run_record = case_run._run_eager(Backend, drive, HERE)
    first, second = schedule.steps[0], schedule.second
    alone, others = with_other_requests(case, first)
    how = ", save_kv_cache=False" * second.stored + ", q, k and v in another memory layout" * second.other_strides
    due = [
        (first, "", ""),
        (first, "the same eager step again", "steps"),
        (second, f"another eager step on the instance ({second.label}{how})", "steps"),
        (alone, alone.label, ""),
        (others, others.label, ""),
    ]
    assert notes.eager == (due if invariant else due[:3])
    assert [(record.step, record.label, record.ran_before) for record in run_record.records] == [
        (step.name, label, ran_before) for step, label, ran_before in notes.eager
    ]
    assert notes.beside == [None] * len(notes.eager)
    assert drive.findings == ["a finding"]
    assert (drive.stage, drive.kernels, len(notes.made)) == (Stage.CONSTRUCTED, "fake", 1)


def test_the_first_eager_step_of_a_mixed_case_has_another_instance_beside_it(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Beside:
        def __init__(self, harness: Any, schedule: Any) -> None:
            made.append((harness, schedule))

        def another_run(self) -> None: ...

    monkeypatch.setattr(case_run, "EagerCoResident", Beside)
    schedule = make_schedule(parse_case(MIXED))
    case_run._run_eager(TorchNativeBackend, setup_of([schedule]), HERE)
    own, co_resident = notes.made
    ((harness, runs),) = made
    assert (own.schedules, harness, co_resident.schedules) == ([schedule], co_resident, [runs])
    assert runs.case.heads.q_heads == 2, "and schedules of other heads"
    assert [between is not None for between in notes.beside] == [True, False, False]
    assert [ran_before for _, _, ran_before in notes.eager] == ["instances", "steps", "steps"]


def test_one_request_has_no_company_to_be_without(notes: Notes) -> None:
    class Backend(TorchNativeBackend):
        capabilities = TorchNativeBackend.capabilities.with_changes(promises={"batch_invariant": True})

    case_run._run_eager(Backend, setup_of([make_schedule(parse_case(PLAIN.replace("k3.9.6", "k9")))], Backend), HERE)
    assert len(notes.eager) == 3


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Unsupported("no fp32"), "RuntimeError: refused a declared case: Unsupported: no fp32"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_a_constructor_that_raises_has_raised_in_the_constructor(
    notes: Notes, error: BaseException, cause: str
) -> None:
    notes.error = error
    drive = setup_of([make_schedule(parse_case(PLAIN))])
    with pytest.raises(RunError) as caught:
        case_run._run_eager(TorchNativeBackend, drive, HERE)
    assert caught.value.phase == "constructor"
    raised = caught.value.__cause__
    assert f"{type(raised).__name__}: {raised}" == cause
    assert drive.stage is Stage.STARTED


def test_ctrl_c_in_a_constructor_is_the_users(notes: Notes) -> None:
    notes.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        case_run._run_eager(TorchNativeBackend, setup_of([make_schedule(parse_case(PLAIN))]), HERE)


CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`")
ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("then", "emulated", "lost"),
    [
        (RuntimeError(f"{ILLEGAL}\nmore"), False, ILLEGAL),
        (None, False, ""),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False, ""),
        (RuntimeError(ILLEGAL), True, ""),
    ],
    ids=["lost", "a device that works", "another error", "no device"],
)
def test_a_library_that_could_not_begin_because_the_context_is_lost_is_a_crash(monkeypatch, then, emulated, lost):
    def synchronize(index: int) -> None:
        assert index == 1
        if then:
            raise then

    monkeypatch.setattr(case_run.torch.cuda, "synchronize", synchronize)
    environment: Any = Of(
        emulated=emulated,
        index=1,
        active=lambda **_: contextlib.nullcontext(),
        kind="cuda",
        device="a device",
        poisons_fresh_memory=False,
    )

    def raises(*_: object) -> RunRecord:
        raise RunError("forward", "") from CUBLAS

    monkeypatch.setattr(case_run, "_run_eager", raises)
    request = RunCase(PLAIN, Execution.EAGER)
    record = case_run.run_case(TorchNativeBackend, request, environment, TorchNativeBackend.capabilities)
    assert record.lost == lost
    (finding,) = record.findings
    assert (f"({lost})" in finding.hint) == bool(lost)


def test_an_error_that_says_that_the_context_is_lost_asks_no_device(monkeypatch):
    monkeypatch.setattr(case_run.torch.cuda, "synchronize", lambda *_: pytest.fail("asked"))
    assert case_run._lost_context(RuntimeError(ILLEGAL), Of(emulated=False, index=0)) == ILLEGAL
