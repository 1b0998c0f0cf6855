"""What the failing cases of a cause share, and no passing case has."""

from __future__ import annotations

import pytest

from attn_testkit.reports.in_common import in_common
from attn_testkit.results.case_result import CaseResult, Status

CASE = "decode-gqa2x2-d64-bf16-{}-shuffled-gauss{}-b2prod"


def run(page: str, more: str = "", status: Status = Status.FAILED, keys: str = "k7x2", **fields: str) -> CaseResult:
    case = CASE.format(f"{page}-{keys}", more)
    return CaseResult("b", fields.get("mode", "decode"), fields.get("execution", "eager"), case, status)


PASSED = Status.PASSED
TWO = [run("p64"), run("p64", keys="k9x2")]


def test_a_value_of_all_failing_cases_and_of_no_passing_one_is_named_with_those_that_pass() -> None:
    good = [run("p16", status=PASSED), run("p8", status=PASSED, keys="k9x2")]
    assert in_common(TWO, [*TWO, *good]) == "page size 64; all cases of page size 8, 16 pass"


def test_a_value_that_a_passing_case_has_is_not() -> None:
    good = [run("p16", status=PASSED), run("p64", status=PASSED, keys="k8x2")]
    assert in_common(TWO, [*TWO, *good]) == ""


def test_an_option_is_named_whatever_its_number() -> None:
    bad = [run("p16", "-w4"), run("p16", "-w11")]
    good = [run("p16", status=PASSED), run("p8", status=PASSED)]
    assert in_common(bad, [*bad, *good]) == "a sliding window; all cases without it pass"
    sinks = [run("p16", "-sink"), run("p8", "-sink")]
    assert in_common(sinks, [*sinks, *good]) == "sinks; all cases without it pass"


@pytest.mark.parametrize(("longest", "named"), [("k8x2", True), ("k9x2", False)])
def test_a_number_of_keys_that_only_failing_cases_reach_is_named(longest: str, named: bool) -> None:
    bad = [run("p16", keys="k9x2"), run("p8", keys="k20.1")]
    good = [run("p16", status=PASSED, keys=longest), run("p8", status=PASSED, keys="k2x2")]
    found = in_common(bad, [*bad, *good])
    assert found == ("a request of at least 9 KV tokens before the step; all cases with up to 8 pass" if named else "")


def test_only_runs_of_the_same_backend_mode_and_execution_are_compared() -> None:
    good = [run("p16", status=PASSED), run("p8", status=PASSED)]
    assert in_common(TWO, [*TWO, *good])
    elsewhere = [run("p64", status=PASSED, keys="k8x2", execution="graph")]
    assert in_common(TWO, [*TWO, *good, *elsewhere]), "what passes in graphs says nothing of eager"


@pytest.mark.parametrize("count", [1, 2])
def test_one_case_on_either_side_shows_nothing(count: int) -> None:
    good = [run("p16", status=PASSED), run("p8", status=PASSED)][:count]
    assert bool(in_common(TWO, [*TWO, *good])) is (count == 2)
    assert bool(in_common(TWO[:count], [*TWO, run("p16", status=PASSED), run("p8", status=PASSED)])) is (count == 2)


def test_a_case_of_another_cause_is_not_counted_as_right() -> None:
    other = run("p16", status=Status.CRASHED)
    assert in_common(TWO, [*TWO, other, run("p8", status=PASSED)]) == ""


def decode(dim: int, dtype: str, page: int, keys: str, status: Status, more: str = "") -> CaseResult:
    case = f"decode-gqa2x2-d{dim}-{dtype}-p{page}-{keys}-shuffled-gauss{more}-b2prod"
    return CaseResult("b", "decode", "eager", case, status)


CONFOUNDED = (
    *(decode(64, "fp16", 64, keys, Status.FAILED) for keys in ("k7x2", "k70.1")),
    *(decode(128, "bf16", 16, keys, PASSED) for keys in ("k7x2", "k71.1")),
)
TOGETHER = "(always together here; minimize tells them apart); all cases without them pass"


def test_settings_that_these_cases_cannot_tell_apart_are_named_together_so_that_the_true_one_is_there() -> None:
    found = in_common(CONFOUNDED[:2], CONFOUNDED)
    assert found == f"head dim 64, dtype fp16, page size 64 {TOGETHER}"


def test_a_passing_case_with_one_of_them_takes_that_one_away() -> None:
    other = decode(64, "bf16", 64, "k8x2", PASSED)
    assert in_common(CONFOUNDED[:2], [*CONFOUNDED, other]) == "dtype fp16; all cases of dtype bf16 pass"


def test_a_length_that_goes_with_a_setting_is_named_with_it() -> None:
    runs = [
        *(decode(64, "bf16", 64, keys, Status.FAILED) for keys in ("k70x2", "k71x2")),
        *(decode(64, "bf16", 16, keys, PASSED) for keys in ("k7x2", "k8x2")),
    ]
    assert in_common(runs[:2], runs) == f"page size 64, a request of at least 70 KV tokens before the step {TOGETHER}"


def test_an_option_is_not_named_twice_once_with_its_number() -> None:
    runs = [
        *(decode(64, "bf16", 16, keys, Status.FAILED, "-w4") for keys in ("k7x2", "k8x2")),
        *(decode(64, "bf16", 16, keys, PASSED) for keys in ("k7x2", "k8x2")),
    ]
    assert in_common(runs[:2], runs) == "a sliding window; all cases without it pass"
