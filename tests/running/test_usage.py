"""Unhelpful input: one clear line, with the right spelling, and never a skip."""

import pytest
from in_process import check_backend, plan_run, run

from attn_testkit.cli import main as command
from attn_testkit.contract import Capabilities, Requires
from attn_testkit.environment import Environment, missing_here, planned, resolve
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import Status
from attn_testkit.results.run_header import exit_code

CASE = "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backends": []}, "no backend was named"),
        ({"backends": ["tritn"]}, "did you mean 'triton'"),
        ({"backends": ["attn_testkit.examples.MinimalBackend"]}, "attn_testkit.examples:MinimalBackend"),
        ({"backends": ["torch_native"], "modes": ["target_verify"]}, "did you mean 'target-verify'"),
        ({"backends": ["torch_native"], "executions": ["graphs"]}, "did you mean 'graph'"),
        ({"backends": ["torch_native"], "tier": "smok"}, "did you mean 'smoke'"),
        ({"backends": ["torch_native"], "device": "gpu"}, "unknown device 'gpu'"),
        ({"backends": ["torch_native"], "cases": ["decode-gqa4x2-d64"]}, "it lacks dtype"),
        ({"backends": ["torch_native"], "cases": ["decode-nothing-like-*"]}, "no case matches"),
        ({"backends": ["broken_backends:NotABackend"]}, "AttentionBackend"),
    ],
)
def test_wrong_usage_is_answered_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_run(**{"device": "cpu", **arguments})  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_that_asks_the_device_where_it_is_imported_is_answered() -> None:
    asked = ["--device", "cpu", "--mode", "decode", "--case", CASE]
    assert command(["run", "-b", "asks_at_import:Backend", *asked]) == 0


def test_an_import_that_breaks_on_the_device_names_the_authors_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["run", "-b", "reshapes_at_import:Backend", "--device", "cpu"]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "RuntimeError: shape '[2, 2]' is invalid for input of size 3" in said
    assert said.endswith("reshapes_at_import.py:5)")


def test_a_device_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="sees no CUDA device; use --device cpu"):
        plan_run(backends=["torch_native"], device="cuda:3")


def test_undeclared_modes_are_unsupported_and_not_counted() -> None:
    plan = plan_run(backends=["broken_backends:ForwardExits"], device="cpu", cases=[CASE], executions=["eager"])
    results = list(run(plan))
    assert [r.status for r in results if not r.case] == [Status.UNSUPPORTED] * 5
    assert plan.header.planned == 1


def test_a_missing_package_is_not_run_here_and_never_a_pass() -> None:
    results = check_backend("needs_packages:NeedsTheImpossible", device="cpu", executions=["eager"])
    mine = [r for r in results if r.mode == "decode"]
    assert [(r.status, r.reason) for r in mine] == [
        (Status.NOT_RUN_HERE, "no-such-kernels>=9 is not installed"),
    ]


def test_green_needs_a_denominator() -> None:
    plan = plan_run(backends=["attn_testkit.examples:MinimalBackend"], device="cpu", cases=[CASE])
    results = list(run(plan))
    assert exit_code(plan.header.planned, results) == 0
    assert exit_code(plan.header.planned, results[:-1]) == 1, "a declared case-run that did not run"
    assert exit_code(0, []) == 5


def test_emulated_results_say_so() -> None:
    plan = plan_run(backends=["attn_testkit.examples:MinimalBackend"], device="cpu", cases=[CASE])
    eager, graph = (r for r in run(plan) if r.case)
    assert eager.emulated
    assert graph.emulated
    assert graph.graph == "emulated"
    assert plan.header.device_name == "CPU (emulated CUDA)"
    assert plan.header.limits


def test_graph_support_that_works_and_is_not_declared_is_a_hint() -> None:
    for name, expected in (("EagerOnly", True), ("EagerOnlyAndRightly", False)):
        plan = plan_run(backends=[f"undeclared_graphs:{name}"], device="cpu", cases=[CASE], modes=["decode"])
        (eager,) = (r for r in run(plan) if r.case)
        assert eager.status is Status.PASSED
        assert bool(eager.hints) == expected
        assert plan.header.planned == 1


def test_a_driver_is_asked_only_for_what_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with several GPUs takes seconds to answer, in each process."""

    def refuse(*_: object) -> bool:
        raise AssertionError("asked")

    for name in ("is_available", "device_count", "get_device_capability"):
        monkeypatch.setattr(f"torch.cuda.{name}", refuse)
    assert resolve("cpu") == planned("cpu", "emulated") == planned("auto", "emulated") == Environment(emulated=True)
    assert planned("cuda:3", "cuda") == Environment(emulated=False, index=3)
    assert planned("auto", "cuda") == planned("cuda", "cuda") == Environment(emulated=False)
    assert not missing_here(Capabilities(eager={"decode"}), planned("cuda", "cuda"))
    needs = Capabilities(eager={"decode"}, requires=Requires((90, 100)))
    for ask in (lambda: resolve("auto"), lambda: missing_here(needs, planned("cuda", "cuda"))):
        with pytest.raises(AssertionError, match="asked"):
            ask()
