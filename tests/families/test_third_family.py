"""A third family in one file of its own shows that a family is a seam: no package of the kit is touched for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import find
from in_process import check_backend

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ForwardMode
from attn_testkit.contract.head_layout import HEAD_LAYOUTS, HeadLayout, register_head_layout
from attn_testkit.families.table import FAMILIES, family_of, meaningful, meaningless, register
from attn_testkit.fuzz.strategies import random_cases
from attn_testkit.results.case_result import CaseResult

WINDOWED = "decode-mean2-d64-fp32-p16-k300.70.12-interleaved-shifted-w11-b3prod"
CODES = "decode-mean2-d64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod"
OTHERS = [
    "decode-mean2-d64-bf16-p1-k1.2.5.9.14.2.30-shuffled-gauss-b8prod-multi_mode",
    "decode-mean2-d64-bf16-p1-k32.128.64.16-reversed-peaked-w46-b5stale",
    "extend-mean2-d64-bf16-p1-k1.2.5.9.14.2.30-n3a9.7.1x5-chunks3-shared-shifted-w46-b8prod",
]
LINES = 150


@pytest.fixture(scope="module")
def mean() -> Iterator[ModuleType]:
    """The file of the family, which registers it. Other tests of this process have the kit's families only."""
    yield import_module("mean_family")
    HEAD_LAYOUTS.pop("mean")
    FAMILIES.pop("mean")
    sys.modules.pop("mean_family")


def results(backend: type, cases: list[str] | None = None) -> list[CaseResult]:
    chosen = {"cases": cases} if cases else {"tier": "smoke"}
    return [each for each in check_backend(backend, device="cpu", diagnose="all", **chosen) if each.case]


def test_a_right_backend_of_a_third_family_passes_in_eager_and_in_graphs(mean: ModuleType) -> None:
    found = results(mean.RightBackend, [WINDOWED, CODES, *OTHERS])
    assert {each.status for each in found} == {"passed"}
    ran = {(each.mode, each.execution) for each in found}
    assert ran == {("decode", "eager"), ("decode", "graph"), ("extend", "eager")}
    assert max(each.margin for each in found if each.margin is not None) > 0.01, "something was compared"


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_window_that_is_off_by_one_fails_with_what_the_family_supposes(mean: ModuleType, execution: str) -> None:
    found = results(mean.WindowOffByOneBackend, [WINDOWED])
    (finding,) = next(each.findings for each in found if each.execution == execution)
    assert finding.check == "matches-oracle"
    assert finding.hint == (
        "the window is off by one: the result is the mean of the last W values, and not of the last W + 1"
    )


def test_a_stale_row_of_a_replay_fails_and_is_right_in_eager(mean: ModuleType) -> None:
    eager, graph = results(mean.StaleRowBackend, [WINDOWED])
    assert (eager.execution, eager.status) == ("eager", "passed")
    finding = graph.findings[0]
    assert finding.check == "replay-follows-batch"
    assert "at a replay; eager mode is right" in finding.headline


def test_questions_of_softmax_are_absent_in_another_family(mean: ModuleType) -> None:
    found = results(mean.WindowOffByOneBackend, [WINDOWED])
    assert {(finding.attended, finding.keys) for each in found for finding in each.findings} == {("", None)}
    (codes, _) = results(mean.RightBackend, [CODES])
    assert "matches-oracle" in codes.checks
    assert "keys-counted-once" not in {*codes.checks, *codes.not_evaluated}


def test_what_means_nothing_to_a_family_is_refused_by_name_and_never_planned(mean: ModuleType) -> None:
    class TakesSinks(mean.RightBackend):
        capabilities = mean.RightBackend.capabilities.with_changes(
            options={"sinks": True}, graph=set(), eager={"decode"}
        )

    named = WINDOWED.replace("-w11-", "-w11-sink-")
    assert meaningless(parse_case(named)) == ["sinks"]
    assert meaningful(parse_case(named)) == parse_case(WINDOWED)
    softmax = parse_case(named.replace("mean2", "mha2"))
    assert meaningful(softmax) is softmax
    (refused,) = results(TakesSinks, [named])
    assert refused.status == "unsupported"
    assert "sinks, which means nothing to mean" in refused.reason
    planned = [each.case for each in results(TakesSinks)]
    assert planned
    assert not [case for case in planned if "-sink" in case]
    assert any("-w" in case for case in planned), "and what stood with it is tried"
    drawn = find(random_cases(TakesSinks.capabilities, ForwardMode.DECODE), lambda case: case.window > 0)
    assert not drawn.sinks


def test_the_third_family_is_one_short_file(mean: ModuleType) -> None:
    assert len(Path(str(mean.__file__)).read_text().splitlines()) <= LINES


def test_a_name_is_registered_once_and_features_have_to_exist(mean: ModuleType) -> None:
    register(mean.MEAN)
    with pytest.raises(ValueError, match="a family named 'mean' exists already"):
        register(replace(mean.MEAN))
    with pytest.raises(ValueError, match="no feature of cases is called speed"):
        register(replace(mean.MEAN, features=mean.MEAN.features | {"speed"}))
    with pytest.raises(ValueError, match="leaves out head dim, in which every case has a value"):
        register(replace(mean.MEAN, features=mean.MEAN.features - {"head dim"}))
    with pytest.raises(ValueError, match="a head layout named 'mha' exists already"):
        register_head_layout(HeadLayout("mha", "one"))
    with pytest.raises(ValueError, match="lower-case letters"):
        register_head_layout(HeadLayout("mean2", "one"))


def test_a_layout_whose_family_nobody_registered_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEAD_LAYOUTS, "lost", HeadLayout("lost", "as many", family="nowhere"))
    with pytest.raises(KeyError, match="head layout 'lost' is of family 'nowhere', which nobody registered"):
        family_of(parse_case(WINDOWED.replace("mean2", "lost2")))
