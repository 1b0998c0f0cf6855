"""Bugs of other people's backends, as their threads tell them: the kit was measured by them before it knew them."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, Execution, ForwardMode
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.plan import plan_run as planned
from attn_testkit.running.planning.request import Diagnose, Options, Request
from attn_testkit_corpus.audit import Settings
from attn_testkit_corpus.audit.tasks import run_task
from attn_testkit_corpus.audit.verdicts import ControlVerdict, FaultVerdict, Task
from attn_testkit_corpus.faults.catalogue import CorpusEntry, field_bugs_in

KERNELS_RUN = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
BUGS = field_bugs_in(str(Path(__file__).parent), r"bugs_\w+" if KERNELS_RUN else r"bugs_(?!triton_kernels)\w+")
SETTINGS = Settings(device="cpu")
TIERS = ("smoke", "core")
THREAD = r"[\w. -]+ (#\d+|[0-9a-f]{7,40})"
"""A repository with a number, or with a commit where there is no thread."""


def runner(diagnose: Diagnose) -> Runner:
    return Runner(Options(in_process=True, diagnose=diagnose))


def verdict_of(bug: CorpusEntry, diagnose: Diagnose) -> FaultVerdict:
    verdict = run_task(Task("fault", bug.slug), SETTINGS, runner(diagnose))
    assert isinstance(verdict, FaultVerdict)
    return verdict


def by_capabilities() -> list[CorpusEntry]:
    """Bugs of the same capabilities one after another: their cases are remembered."""
    found: dict[Capabilities, list[CorpusEntry]] = {}
    for each in BUGS:
        found.setdefault(each.backend.capabilities, []).append(each)
    return [each for same in found.values() for each in sorted(same, key=lambda bug: (bug.case, bug.executions))]


def one_of_each_kind() -> list[CorpusEntry]:
    """The newest bug of each mechanism and check. The nightly runs all of them, each with its parent."""
    kinds = {(bug.backend.__module__, bug.checks[0]): bug for bug in sorted(BUGS, key=lambda bug: bug.in_set)}
    return [bug for bug in by_capabilities() if bug in kinds.values()]


@pytest.mark.parametrize("bug", one_of_each_kind(), ids=lambda bug: f"{bug.backend.__name__}-{bug.in_set}")
def test_a_bug_is_caught_by_its_check(bug: CorpusEntry) -> None:
    verdict = verdict_of(bug, "none")
    # Diagnosis takes several runs. It is only needed if it reports the failure under the id of its cause.
    if verdict.first != bug.checks[0]:
        verdict = verdict_of(bug, "all")
    assert verdict.case_runs == 1
    assert verdict.first == bug.checks[0], verdict.text


@pytest.mark.parametrize(
    "bug", {bug.backend.__module__: bug for bug in one_of_each_kind()}.values(), ids=lambda bug: bug.backend.__name__
)
def test_without_the_bug_its_case_passes(bug: CorpusEntry) -> None:
    task = Task("control", bug.slug, bug.modes[0].value, bug.executions[0].value)
    verdict = run_task(task, SETTINGS, runner("none"))
    assert isinstance(verdict, ControlVerdict)
    assert verdict.case_runs == 1
    assert verdict.texts == ()


@pytest.mark.parametrize("bug", one_of_each_kind(), ids=lambda bug: f"{bug.backend.__name__}-{bug.in_set}")
def test_a_run_tries_the_case_that_catches_a_bug(bug: CorpusEntry) -> None:
    mode = parse_case(bug.case_of_tier).mode
    assert any(bug.case_of_tier in cases_of(bug.backend.capabilities, mode, bug.executions[0], t) for t in TIERS)


@lru_cache(maxsize=8)  # those of a bug and of the next ones with its capabilities
def cases_of(declared: Capabilities, mode: ForwardMode, execution: Execution, tier: str) -> frozenset[str]:
    """Cases of a plan for any backend with these capabilities: planning needs nothing else of it."""
    request = Request((Candidate("any:Backend"),), (mode.value,), (execution.value,), tier=tier, device="cpu")
    return frozenset(item.case for item in planned(request, lambda _: declared).items)


def test_bugs_of_each_set_are_here_with_their_threads() -> None:
    assert Counter(bug.in_set for bug in BUGS) == {
        0: 1, 1: 55, 2: 50, 3: 47, 4: 50, 5: 45 if KERNELS_RUN else 40, 6: 47, 7: 5, 9: 3, 10: 4, 11: 2, 12: 3, 13: 2,
        14: 40, 15: 32, 16: 52, 17: 10, 18: 38, 19: 40,
    }  # fmt: skip
    for bug in BUGS:
        assert bug.in_set == 0 or re.fullmatch(f"{THREAD}(, {THREAD})*", bug.source)
