"""Bugs of other people's backends, as their threads tell them: the kit was measured by them before it knew them."""

from __future__ import annotations

import bugs_of_masks  # noqa: F401
import pytest
from bug_table import BUGS, Bug
from in_process import plan_run, run

from attn_testkit.results import CaseResult, Status, format_failure


def result_of(backend: type, bug: Bug) -> tuple[CaseResult, str]:
    plan = plan_run(backends=[backend], device="cpu", tier="core", cases=[bug.case], executions=[bug.execution])
    (result,) = (result for result in run(plan) if result.status is not Status.UNSUPPORTED)
    return result, format_failure(result, plan.header) if result.findings else result.status.name


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.backend.__name__)
def test_a_bug_is_caught_by_its_check_and_without_it_the_case_passes(bug: Bug) -> None:
    wrong, text = result_of(bug.backend, bug)
    assert wrong.status is Status.FAILED, text
    assert wrong.findings[0].check == bug.check, text
    right, text = result_of(bug.healthy, bug)
    assert right.status is Status.PASSED, text


def test_no_bug_is_entered_twice_or_without_its_thread() -> None:
    assert len({bug.backend for bug in BUGS}) == len(BUGS)
    assert all("#" in bug.threads for bug in BUGS)
    assert all(bug.backend.__doc__ for bug in BUGS)
