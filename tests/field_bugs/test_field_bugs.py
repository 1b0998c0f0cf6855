"""Bugs of other people's backends, as their threads tell them: the kit was measured by them before it knew them."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import bugs_eleventh_slipped  # noqa: F401
import bugs_fifth_addresses  # noqa: F401
import bugs_fifth_masks  # noqa: F401
import bugs_fifth_slipped  # noqa: F401
import bugs_fifth_softmax  # noqa: F401
import bugs_fifth_state  # noqa: F401
import bugs_fourth_addresses  # noqa: F401
import bugs_fourth_masks  # noqa: F401
import bugs_fourth_slipped  # noqa: F401
import bugs_fourth_softmax  # noqa: F401
import bugs_fourth_state  # noqa: F401
import bugs_ninth_slipped  # noqa: F401
import bugs_of_addresses  # noqa: F401
import bugs_of_masks  # noqa: F401
import bugs_of_softmax  # noqa: F401
import bugs_of_state  # noqa: F401
import bugs_second_addresses  # noqa: F401
import bugs_second_masks  # noqa: F401
import bugs_second_slipped  # noqa: F401
import bugs_second_softmax  # noqa: F401
import bugs_second_state  # noqa: F401
import bugs_seventh_slipped  # noqa: F401
import bugs_sixth_addresses  # noqa: F401
import bugs_sixth_masks  # noqa: F401
import bugs_sixth_slipped  # noqa: F401
import bugs_sixth_softmax  # noqa: F401
import bugs_sixth_state  # noqa: F401
import bugs_tenth_slipped  # noqa: F401
import bugs_third_addresses  # noqa: F401
import bugs_third_masks  # noqa: F401
import bugs_third_slipped  # noqa: F401
import bugs_third_softmax  # noqa: F401
import bugs_third_state  # noqa: F401
import bugs_thirteenth_slipped  # noqa: F401
import bugs_twelfth_slipped  # noqa: F401
import pytest
from bug_table import BUGS, MADE_LATER, Bug
from in_process import plan_run, run

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import AttentionBackend, Capabilities
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure

KERNELS_RUN = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
if KERNELS_RUN:
    import bugs_fifth_kernels  # noqa: F401

THREAD = r"[\w. -]+ (#\d+|[0-9a-f]{7,40})"
"""A repository with a number, or with a commit where there is no thread."""


def result_of(backend: type[AttentionBackend], case: str, execution: str) -> tuple[CaseResult, str]:
    plan = plan_run(backends=[backend], device="cpu", tier="core", cases=[case], executions=[execution])
    # Which check fails is asked here, and not why: that takes longer than all else.
    plan = replace(plan, explains="check")
    (result,) = (result for result in run(plan) if result.status is not Status.UNSUPPORTED)
    return result, format_failure(result, plan.header) if result.findings else result.status.name


@cache
def result_without(parent: type[AttentionBackend], declared: Capabilities, case: str, execution: str) -> Status | str:
    """Passed, or the text of the failure. Bugs of one parent are often caught by one case."""
    healthy = type(f"Without{parent.__name__}", (parent,), {"capabilities": declared})
    result, text = result_of(healthy, case, execution)
    return result.status if result.status is Status.PASSED else text


def by_capabilities() -> list[Bug]:
    """Bugs of the same capabilities one after another: their cases are remembered, and what runs without them."""
    found: dict[Capabilities, list[Bug]] = {}
    for each in BUGS:
        found.setdefault(each.backend.capabilities, []).append(each)
    return [each for same in found.values() for each in sorted(same, key=lambda bug: (bug.case, bug.execution))]


@pytest.mark.parametrize("bug", by_capabilities(), ids=lambda bug: bug.backend.__name__)
def test_a_bug_is_caught_by_its_check_and_without_it_the_case_passes(bug: Bug) -> None:
    wrong, text = result_of(bug.backend, bug.case, bug.execution)
    assert wrong.status is Status.FAILED, text
    assert wrong.findings[0].check == bug.check, text
    (parent,) = bug.backend.__bases__
    assert result_without(parent, bug.backend.capabilities, bug.case, bug.execution) is Status.PASSED


@pytest.mark.parametrize("bug", by_capabilities(), ids=lambda bug: bug.backend.__name__)
def test_a_run_tries_the_case_that_catches_a_bug(bug: Bug) -> None:
    plans = (
        plan_run(
            backends=[bug.backend], device="cpu", tier=tier, executions=[bug.execution],
            modes=[parse_case(bug.of_a_tier).mode.value],
        )
        for tier in ("smoke", "core")
    )  # fmt: skip
    assert any(bug.of_a_tier == item.case for plan in plans for item in plan.items)


def test_every_bug_of_six_sets_and_what_slipped_through_of_later_ones_is_here_once_with_its_thread() -> None:
    assert len({bug.backend for bug in BUGS}) == len({bug.backend.__name__ for bug in BUGS}) == len(BUGS)
    of_sets = Counter(bug.backend.__module__.split("_")[1] for bug in BUGS)
    of_sets["of"] -= sum(bug.threads == MADE_LATER for bug in BUGS if bug.backend.__module__.startswith("bugs_of"))
    assert of_sets == {
        "of": 55, "second": 50, "third": 47, "fourth": 50, "fifth": 45 if KERNELS_RUN else 40, "sixth": 47,
        "seventh": 5, "ninth": 3, "tenth": 4, "eleventh": 2, "twelfth": 3, "thirteenth": 2,
    }  # fmt: skip
    for bug in BUGS:
        assert bug.threads == MADE_LATER or re.fullmatch(f"{THREAD}(, {THREAD})*", bug.threads)
        assert bug.backend.__doc__
