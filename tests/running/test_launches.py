"""The record says how many kernels of its own a backend launched, and one line says if it launched none."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attn_testkit import check_backend
from attn_testkit.reports.outcome import Results
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.remarks import launch_lines
from attn_testkit.results.run_header import RunHeader

CASES = [f"decode-mha2-d64-bf16-p{page}-k33-shuffled-gauss-b1prod" for page in (1, 16)]


def checked(spec: str) -> Results:
    """One case of each page size, eager and as a graph, in processes of their own."""
    results = check_backend(spec, device="cpu", cases=CASES)
    assert [row.status for row in results if row.case] == [Status.PASSED] * 4
    return results


def lines_of(results: Results) -> list[str]:
    return launch_lines(results.header, results.rows)


@pytest.mark.parametrize("name", ["LaunchesOnSmallPages", "CallsAnOperator"])
def test_a_fallback_for_some_cases_is_one_line_next_to_the_verdict(name):
    spec = f"launching_backends:{name}"
    results = checked(spec)
    (line,) = lines_of(results)
    assert line == f"2 of 4 case-runs launched no kernel of {spec}, only torch ran: decode eager 1, decode graph 1"
    assert str(results).splitlines()[-2] == line
    assert {("-p1-" in row.case): bool(row.launches) for row in results if row.case} == {True: True, False: False}


def test_a_backend_that_has_kernels_and_launches_none_is_one_line():
    results = checked("launching_backends:LaunchesNever")
    assert lines_of(results) == [
        "none of 4 case-runs launched a kernel of launching_backends:LaunchesNever, which has "
        "launching_backends.own_kernel"
    ]


@pytest.mark.parametrize("spec", ["launching_backends:LaunchesAlways", "attn_testkit.examples:MinimalBackend"])
def test_a_backend_that_always_launches_and_one_of_torch_alone_have_no_line(spec):
    results = checked(spec)
    assert lines_of(results) == []
    launched = [row.launches for row in results if row.case]
    assert all(launched) if "Always" in spec else launched == [0] * 4


def row(launches: int | None, status: Status = Status.PASSED, mode: str = "decode", backend: str = "m:A") -> CaseResult:
    return CaseResult(backend, mode, "eager", "decode-a", status, launches=launches)


@pytest.fixture
def header() -> RunHeader:
    return replace(checked_header(), sources={"m:A": {"file": "m.py", "kernels": ""}})


def checked_header() -> RunHeader:
    return RunHeader("0", "2026", "", "smoke", 0, "emulated", "CPU", {}, {"m:A": ""}, 1)


def test_what_nobody_counted_and_what_did_not_pass_has_no_part_in_it(header):
    assert launch_lines(header, [row(3), row(None)]) == []
    assert launch_lines(header, [row(3), row(0, Status.FAILED)]) == []
    assert launch_lines(header, [row(3), row(0)]) == [
        "1 of 2 case-runs launched no kernel of m:A, only torch ran: decode eager 1"
    ]
    assert launch_lines(header, [row(0), row(0)]) == []
    assert launch_lines(header, [row(3), row(0, backend="m:B")]) == [], "each backend by itself"


def test_operators_of_torch_are_no_kernels_of_the_author(monkeypatch):
    from attn_testkit.watches.launches import Launches

    # Another test may have imported FlashInfer, whose launches are not counted.
    monkeypatch.setattr("attn_testkit.watches.launches._NOT_COUNTED", ())
    stock = torch._ops.OpOverload.__call__
    launches = Launches()
    launches.install()
    try:
        counted = launches.begin()
        torch.ops.aten.add(torch.ones(1), 1)
        torch.ops.aten.add.Tensor(torch.ones(1), torch.ones(1))
        assert launches.count(counted) == 0
    finally:
        launches.remove()
    assert torch._ops.OpOverload.__call__ is stock


def test_counters_of_one_process_wrap_once_and_restore_with_the_last_in_whatever_order(monkeypatch):
    """Workers in one process overlap: each wrapped what the others had, until Python's stack was full."""
    from attn_testkit.watches import launches
    from attn_testkit.watches.launches import Launches

    # Workers of other tests may still count in this process.
    monkeypatch.setattr(launches, "_WRAPPED", launches._Wrapped())
    stock = torch._ops.OpOverload.__call__
    first, second = Launches(), Launches()
    first.install()
    wrapped = torch._ops.OpOverload.__call__
    second.install()
    assert stock is not wrapped
    assert torch._ops.OpOverload.__call__ is wrapped, "wrapped once"
    first.remove()
    first.remove()
    assert torch._ops.OpOverload.__call__ is wrapped, "the other counts"
    second.remove()
    assert torch._ops.OpOverload.__call__ is stock


def test_a_package_whose_launches_cannot_be_counted_makes_a_zero_unknown(monkeypatch):
    from attn_testkit.watches.launches import Launches

    launches = Launches()
    launches.install()
    try:
        counted = launches.begin()
        for name in ("cutlass", "tvm_ffi"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        assert launches.count(counted) == 0
        monkeypatch.setitem(sys.modules, "tvm_ffi", ModuleType("tvm_ffi"))
        assert launches.count(counted) is None
    finally:
        launches.remove()
