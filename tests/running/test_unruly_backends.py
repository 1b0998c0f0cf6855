"""No backend reaches the judge, and what one leaves behind in its process is a finding."""

from __future__ import annotations

import contextlib

import pytest
from in_process import check_backend
from test_worker_process import THREE, results_of

from attn_testkit import check_backend as check_in_processes
from attn_testkit.results.case_result import Status
from attn_testkit.results.run_header import exit_code
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options, Request

WRONG = ("Wrong", "WrongAndReplacesJudge", "WrongAndExitsAtExit")


@pytest.mark.parametrize("name", [*WRONG, "ExitsInConstructor", "ExitsInForward"])
def test_a_broken_backend_gets_no_green_whatever_it_does_to_its_process(name: str) -> None:
    found = results_of(name, cases=(THREE,))
    assert exit_code(1, found) == 1
    if name in WRONG:
        assert "matches-oracle" in [finding.check for finding in found[0].findings]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("ReplacesAFunctionOfTheHarness", "attn_testkit.runner_modes.eager.observe was replaced"),
        ("ReplacesAConstantOfTheHarness", "attn_testkit.runner_modes.observe._RETURNED was replaced"),
        ("ReplacesAnEntryOfATable", "attn_testkit.runner_modes.mode_runners.MODE_RUNNERS was modified"),
        ("ReplacesAMethodOfTheHarness", "attn_testkit.runner_modes.harness.ServerHarness.load was replaced"),
        ("ReplacesAFunctionOfTorch", "torch.allclose was replaced"),
        ("WrongAndReplacesJudge", "attn_testkit.results.case_result.BAD was replaced"),
        ("LeavesDefaultDtype", "the default dtype: torch.float32 -> torch.float64"),
        ("LeavesGradModeInConstructor", "the grad mode"),
        ("LeavesSeed", "torch's random state: seed "),
        ("LeavesNumpySeed", "Python's random state: seeded or set"),
        ("LeavesThread", "threads left running: none -> 'prefetcher' (unruly_backends._wait)"),
        ("LeavesChild", "child processes left running: none -> sleep 600"),
        ("LeavesWarningsFilter", "the filters of warnings"),
        ("LeavesSignalHandler", "signal handlers: SIGTERM"),
        ("LeavesEnvironment", "environment variables: SOME_SWITCH_OF_A_SERVER None -> '1'"),
        ("LeavesDeterminism", "deterministic algorithms"),
    ],
)
def test_what_a_backend_leaves_behind_is_reported_with_before_and_after(name: str, what: str) -> None:
    (found,) = results_of(name, cases=(THREE,))
    assert found.status is Status.FAILED, found.reason
    (finding,) = (finding for finding in found.findings if finding.check == "leaves-process-alone")
    assert what in finding.where


def test_what_a_backend_sends_to_the_judge_itself_is_a_crash_and_runs_nothing_there() -> None:
    (found,) = results_of("SpeaksToTheJudge", cases=(THREE,))
    assert found.status is Status.CRASHED
    assert found.reason.startswith("the process spoke for itself: it sent posix._exit")


@pytest.mark.parametrize("name", ["PutsBack", "EndsItsThread", "DrawsRandomNumbers", "CompilesAFunction"])
def test_what_is_put_back_or_tolerated_is_no_finding(name: str) -> None:
    (found,) = results_of(name, cases=(THREE,))
    assert found.findings == ()


def test_what_one_backend_leaves_behind_does_not_reach_its_neighbour() -> None:
    """Each has a process of its own, in one run with one judge."""
    unruly = ("WrongAndReplacesJudge", "LeavesDefaultDtype", "LeavesSignalHandler")
    found = results_of(*unruly, "attn_testkit.backends.torch_native:TorchNativeBackend", "Wrong", cases=(THREE,))
    by_name = {result.backend.rpartition(":")[2]: result for result in found}
    assert by_name["TorchNativeBackend"].status is Status.PASSED
    assert [finding.check for finding in by_name["Wrong"].findings] == ["matches-oracle"]


def test_what_one_case_run_leaves_behind_is_not_found_in_the_next() -> None:
    """It is put back after it was reported: the finding names the case in which it happened."""
    found = {result.case: result for result in results_of("LeavesEnvironment")}
    assert found[THREE].status is Status.FAILED
    assert [result.status for case, result in found.items() if case != THREE] == [Status.PASSED]


def make_local(factor: float):
    from attn_testkit.backends.torch_native import TorchNativeBackend

    class Local(TorchNativeBackend):
        def forward(self, *args, **more):
            return super().forward(*args, **more) * factor

    return Local


ARGS = {"device": "cpu", "executions": ["eager"], "cases": [THREE]}


def verdict(backend, check=check_in_processes) -> Status:
    (found,) = (result for result in check(backend, **ARGS) if result.case)
    return found.status


@pytest.mark.parametrize("check", [check_in_processes, check_backend], ids=["processes", "in-process"])
def test_the_very_class_that_was_given_is_run(check) -> None:
    """A local class, a second one of the same name, a class of a notebook: none is importable, and none is mistaken."""
    assert verdict(make_local(1.0), check) is Status.PASSED
    assert verdict(make_local(0.75), check) is Status.FAILED
    notebook: dict[str, object] = {"__name__": "__main__"}
    source = (
        "from attn_testkit.backends.torch_native import TorchNativeBackend\n"
        "class Mine(TorchNativeBackend):\n"
        "    def forward(self, *args, **more):\n"
        "        return super().forward(*args, **more) * FACTOR\n"
    )
    for factor, expected in ((1.0, Status.PASSED), (0.75, Status.FAILED)):
        exec(source, notebook)
        notebook["FACTOR"] = factor
        assert verdict(notebook["Mine"], check) is expected


def test_a_class_that_was_changed_after_its_import_is_refused_and_never_another_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import unruly_backends

    from attn_testkit.registry import UsageError

    monkeypatch.setattr(unruly_backends.Wrong, "forward", unruly_backends.TorchNativeBackend.forward)
    with pytest.raises(UsageError, match="differs in this process from the one that an import gives"):
        verdict(unruly_backends.Wrong)


def test_a_class_that_cannot_travel_is_said_so() -> None:
    import threading

    from attn_testkit.registry import UsageError

    local = make_local(1.0)
    local.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be sent to the process that runs it: TypeError.*lock"):
        verdict(local)


def test_a_candidate_is_never_imported_by_the_judge() -> None:
    import sys

    sys.modules.pop("needs_packages", None)
    with contextlib.closing(Runner(Options())) as runner:
        runner.plan(Request(("needs_packages:NeedsTheImpossible",), device="cpu"))
    assert "needs_packages" not in sys.modules
