"""Runs of a profile without running it: every planned case-run passed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.profiles import read_profile
from attn_testkit.reports.record import Report
from attn_testkit.reports.verdict import conclude
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Plan, Request

PROFILE = "2026.12/state"
H200 = {"device": "cuda", "device_name": "NVIDIA H200 sm90"}
CASES = tuple(read_profile(PROFILE).cases)


@cache
def planned() -> Plan:
    command = "attn-testkit run --backend torch_native_state"
    request = Request(("torch_native_state",), profile=PROFILE, device="cpu", command=command)
    return plan_run(request, lambda _: TorchNativeStateBackend.capabilities)


def passed_on_h200(**header: Any) -> Report:
    """A run in which everything passed on a GPU. ``header``: fields that differ."""
    plan = planned()
    rows = [
        CaseResult(
            item.backend, item.mode, item.execution, item.case, Status.PASSED, checks=("completes",), margin=0.5,
            device="cuda", graph="cuda" if item.execution == "graph" else "",
        )
        for item in plan.items
    ]  # fmt: skip
    return concluded(Report(replace(plan.header, **H200 | header), (*plan.preset, *rows), finished=True))


def concluded(report: Report) -> Report:
    """The report with the exit code that its results give."""
    found = conclude(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    return replace(report, exit_code=found.code)


def with_row(report: Report, **changes: Any) -> Report:
    """The report in which the first case-run that passed is another."""
    index = next(number for number, row in enumerate(report.results) if row.status is Status.PASSED)
    rows = list(report.results)
    rows[index] = replace(rows[index], **changes)
    return concluded(replace(report, results=tuple(rows)))


FAILED: dict[str, Any] = {
    "status": Status.FAILED,
    "findings": (Finding("writes-own-state", "slot 3 changed"),),
    "checks": ("writes-own-state",),
    "margin": None,
}
KNOWN: dict[str, Any] = {**FAILED, "status": Status.KNOWN_FAILURE, "reason": "https://example.org/issues/12"}
