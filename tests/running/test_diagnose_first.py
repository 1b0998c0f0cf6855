"""Which failures are diagnosed: the first of a symptom, one more that is plainer, all, or none."""

from __future__ import annotations

import datetime
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from attn_testkit import check_backend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Execution
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.results.finding import Finding
from attn_testkit.running.case_runs.diagnosed import Diagnosed
from attn_testkit.running.planning.request import Options

PLAIN = parse_case("decode-gqa2x2-d64-bf16-p16-k7x2-shuffled-gauss-b2prod")
OTHER = parse_case("decode-gqa2x2-d64-bf16-p16-k9x2-shuffled-gauss-b2prod")
WINDOW = parse_case("decode-gqa2x2-d64-bf16-p16-k9x2-shuffled-gauss-w4-b2prod")
SINK = parse_case("decode-gqa2x2-d64-bf16-p16-k9x2-shuffled-gauss-sink-b2prod")
EAGER, GRAPH = Execution.EAGER, Execution.GRAPH
WRONG, NAN = Finding("matches-oracle", "request 0 differs"), Finding("finite", "request 0 has nan")
SPEC = "attn_testkit.examples.off_by_one:OffByOneBackend"


def settled(*first: object, found: Finding = WRONG, shown: bool = True) -> Diagnosed:
    known = Diagnosed()
    known.note(*first, found, replace(found, check="reads-own-kv"))  # type: ignore[arg-type]
    known.settle(shown=shown)
    return known


def test_a_failure_of_a_known_symptom_is_like_the_first_and_has_its_check() -> None:
    known = settled("b", PLAIN, EAGER)
    for case, finding in ((OTHER, WRONG), (WINDOW, NAN)):
        like = known.like("b", case, EAGER, finding)
        assert like is not None
        assert (like.name, like.check) == (f"eager:{PLAIN.id}", "reads-own-kv")
        assert not known.tells_more("b", case, EAGER, finding)


def test_another_backend_check_or_a_graph_whose_eager_run_is_right_is_another_symptom() -> None:
    known = settled("b", PLAIN, EAGER)
    assert known.like("other", OTHER, EAGER, WRONG) is None
    assert known.like("b", OTHER, EAGER, Finding("writes-own-kv", "a slot was written")) is None
    assert known.like("b", OTHER, GRAPH, WRONG) is None


def test_a_graph_is_like_the_eager_run_of_its_case() -> None:
    known = settled("b", PLAIN, EAGER)
    assert known.like("b", OTHER, EAGER, WRONG)
    for case in (PLAIN, OTHER):
        like = known.like("b", case, GRAPH, NAN)
        assert like is not None
        assert like.name == f"eager:{PLAIN.id}"
    assert known.like("b", WINDOW, GRAPH, WRONG) is None, "its eager run passed"


def test_one_more_is_diagnosed_if_it_lacks_an_option_of_the_first() -> None:
    known = settled("b", WINDOW, EAGER)
    assert not known.tells_more("b", WINDOW, EAGER, WRONG)
    assert known.tells_more("b", PLAIN, EAGER, WRONG)
    assert known.tells_more("b", SINK, EAGER, WRONG)
    known.note("b", SINK, EAGER, WRONG, WRONG)
    known.settle(shown=True)
    assert not known.tells_more("b", PLAIN, EAGER, WRONG), "two are enough"


def test_an_exception_is_known_by_its_line_in_any_mode_and_execution() -> None:
    raised = Finding("completes", "forward raised ValueError: 3", where="attn.py:12 in forward: x")
    known = settled("b", PLAIN, EAGER, found=raised)
    assert known.like("b", OTHER, GRAPH, replace(raised, where="attn.py:12 in forward: x", headline="other"))
    assert known.like("b", OTHER, GRAPH, replace(raised, where="attn.py:13 in forward: y")) is None


def test_a_failure_that_depends_on_earlier_case_runs_stands_for_no_other() -> None:
    assert settled("b", PLAIN, EAGER, shown=False).like("b", OTHER, EAGER, WRONG) is None


CASES = (
    "decode-mha2-d64-fp16-p16-k15.16.17-shared-negative-b6small",
    "decode-mha2-d128-bf16-p16-k21-interleaved-rising_logits-b4stale",
    "decode-gqa2x2-d64-fp16-p16-k7x2-reversed-gauss-b2prod",
    "decode-gqa2x2-d128-bf16-p16-k0.1.16-contiguous-mean-b3prod",
)
"""All fail in graphs, and all but the third in eager mode."""


@cache
def failures(**options: str) -> tuple[CaseResult, ...]:
    return check_backend(SPEC, device="cpu", modes=["decode"], cases=CASES, **options).failures  # type: ignore[arg-type]


def test_by_default_the_first_is_diagnosed_and_the_others_name_it() -> None:
    first = failures()
    one, *others = first
    assert one.diagnosed
    assert "KV tokens" in one.findings[0].hint
    assert not one.like
    assert others
    assert sum(each.diagnosed for each in first) <= 2
    assert all(each.like or each.diagnosed for each in others)
    alike = next(each for each in others if not each.diagnosed)
    assert alike.findings[0].check == one.findings[0].check
    brief = format_failure(alike, brief=True).splitlines()
    assert any(line.startswith(f"  cause    assumed to be that of {one.execution}:") for line in brief)
    assert len(brief) < len(format_failure(alike).splitlines())
    assert sum(each.seconds["diagnosis"] for each in others if not each.diagnosed) < one.seconds["diagnosis"]


@pytest.mark.parametrize("which", ["all", "none"])
def test_all_or_none_can_be_asked_for(which: str) -> None:
    found = failures(diagnose=which)
    assert {each.case for each in found} == set(CASES)
    assert {each.diagnosed for each in found} == {which == "all"}
    assert not any(each.like for each in found)


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown diagnose 'frist'; did you mean 'first'"):
        Options(diagnose="frist")  # type: ignore[arg-type]


KNOWN = """
[[known]]
cases = "*"
kind = "tolerated"
check = "{}"
issue = "https://example.org/1"
until = {}
"""


def test_a_case_that_a_known_failure_may_cover_has_its_own_check_found_out(tmp_path: Path) -> None:
    """What is taken to be like another could be another bug, which an entry must not hide."""
    until = datetime.date.today() + datetime.timedelta(days=30)
    file = tmp_path / "known.toml"
    every = failures(diagnose="all")
    checks = {(row.execution, row.case): [finding.check for finding in row.findings] for row in every}
    file.write_text(KNOWN.format(every[0].findings[0].check, until))
    for which in ("first", "none"):
        known = check_backend(
            SPEC,
            device="cpu",
            modes=["decode"],
            cases=CASES,
            known_failures=file,
            diagnose=which,  # type: ignore[arg-type]
        )
        bad = [row for row in known if row.findings]
        assert any(row.status is Status.KNOWN_FAILURE for row in bad)
        assert {(row.execution, row.case): [finding.check for finding in row.findings] for row in bad} == checks
