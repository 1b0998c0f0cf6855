"""What was raised is shown with its reason and a line of the author's, and never taken for a fault of the kit."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from test_worker_process import THREE

from attn_testkit.reports.record import plain
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options, Request

IN_BOTH = pytest.mark.parametrize("in_process", [False, True], ids=["processes", "in-process"])


def result_of(name: str, *, in_process: bool = True, execution: str = "eager") -> CaseResult:
    runner = Runner(Options(in_process=in_process))
    try:
        request = Request((f"raising_backends:{name}",), executions=(execution,), device="cpu", cases=(THREE,))
        plan = runner.plan(request)
        (result,) = runner.run(plan, plan.items)
    finally:
        runner.close()
    return result


def finding_of(name: str, **more) -> Finding:
    result = result_of(name, **more)
    assert result.status is Status.FAILED, result.reason
    return result.findings[0]


@pytest.mark.parametrize(
    ("name", "headline", "where"),
    [
        (
            "ConstructorTakesMore",
            "the constructor raised TypeError: ConstructorTakesMore.__init__() missing 1 required positional argument",
            "in __init__: def __init__(self, context: BackendContext, workspace: torch.Tensor) -> None:",
        ),
        (
            "PlanTakesNothing",
            "init_forward_metadata raised TypeError: PlanTakesNothing.init_forward_metadata() takes 1 positional",
            "in init_forward_metadata: def init_forward_metadata(self) -> None:",
        ),
        (
            "ForwardTakesNoLayer",
            "forward raised TypeError: ForwardTakesNoLayer.forward() takes 5 positional arguments but 6 were given",
            "in forward: def forward(self, q: Any, k: Any, v: Any, batch: Any)",
        ),
        (
            "RaisesAMuteException",
            "forward raised Mute: (no message: its __str__ raised ValueError)",
            "in forward: raise",
        ),
        ("RaisesOfManyLines", "forward raised RuntimeError: at 3:12: no attribute 'dott'", "in forward: raise"),
        ("RaisesALongMessage", "forward raised RuntimeError: xxx", "in forward: raise self.error"),
    ],
)
def test_what_was_raised_has_its_reason_and_a_line_of_the_authors(name: str, headline: str, where: str) -> None:
    finding = finding_of(name)
    assert finding.headline.startswith(headline)
    assert finding.where.startswith("raising_backends.py:")
    assert where in finding.where


def test_a_message_of_two_megabytes_makes_no_record_of_seven() -> None:
    result = result_of("RaisesALongMessage", in_process=False)
    assert "characters left out" in result.findings[0].headline
    assert len(json.dumps(plain(asdict(result)))) < 10_000


@IN_BOTH
@pytest.mark.parametrize("name", ["LeavesTheDeviceMeta", "LeavesTheDeviceMetaInConstructor"])
def test_a_default_device_that_is_left_behind_is_the_backends_finding(name: str, in_process: bool) -> None:
    """Everything that the kit makes without naming a device would be made there."""
    result = result_of(name, in_process=in_process)
    assert not result.of_the_kit, result.reason
    (finding,) = (finding for finding in result.findings if finding.check == "leaves-process-alone")
    assert "the default device: 'cpu' -> 'meta'" in finding.where


def test_a_default_device_that_this_machine_lacks_is_the_backends_finding_too() -> None:
    result = result_of("LeavesTheDeviceCuda", in_process=False)
    assert not result.of_the_kit, result.reason
    (finding,) = (finding for finding in result.findings if finding.check == "leaves-process-alone")
    assert "the default device: 'cpu' -> 'cuda" in finding.where


@IN_BOTH
def test_what_raises_in_a_replay_is_reported_with_the_line_that_recorded_it(in_process: bool) -> None:
    finding = finding_of("OneRowShort", in_process=in_process, execution="graph")
    assert finding.headline.startswith("replay raised IndexError"), finding
    assert finding.where.startswith("raising_backends.py:")
    assert "in forward: out = out + self.rooms.index_select(0, batch.req_pool_indices)" in finding.where
