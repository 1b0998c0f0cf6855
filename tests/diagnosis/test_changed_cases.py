"""Other cases that a backend is asked for: what it takes before something is said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from wrong_steps import observed, wrong_at

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.changed_case import DRAWS, ChangedCases, with_keys_up_to
from attn_testkit.diagnosis.hints import Evidence, hints
from attn_testkit.diagnosis.hints.changed import later_tiles, right_with_fewer_requests, right_without
from attn_testkit.diagnosis.raised import explain_raised
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.steps.schedule import Schedule, Step, make_schedule

CASE = "decode-gqa2x2-d32-fp32-p16-k63.40x2-shuffled-gauss-w4-cap1.5-sink-b4prod"
Wrong = Callable[[Case], bool | None]
"""Whether a backend is wrong; None: it raises."""


class Backend:
    """Right, wrong or raising, as the case has it."""

    def __init__(self, wrong: Wrong, declared: Callable[[Case], bool] = lambda case: True) -> None:
        self.wrong, self.declared, self.asked = wrong, declared, list[str]()

    def runs_eagerly(self, schedule: Schedule) -> bool:
        return True

    def eager(self, schedule: Schedule, step: Step) -> Observation | None:
        assert step is schedule.steps[0]
        self.asked.append(schedule.case.id)
        wrong = self.wrong(schedule.case)
        if wrong is None:
            return None
        out = expect(schedule, step).attention + 9.0 * wrong
        return observed(schedule, out)


def asked_of(wrong: Wrong, case: str = CASE, **more: Any) -> ChangedCases:
    return ChangedCases(Backend(wrong, **more), make_schedule(parse_case(case)))  # type: ignore[arg-type]


def longest(case: Case) -> int:
    return max(case.prefixes) + 1


def test_a_feature_is_named_where_every_draw_is_wrong_with_it_and_right_without() -> None:
    asked = asked_of(lambda case: case.logit_cap > 0)
    assert asked.right_without("cap")
    assert not any(asked.right_without(name) for name in ("sinks", "window", "fp8", "data", "layers", "far", "counts"))


def test_a_feature_without_which_the_case_is_wrong_too_is_not_the_cause() -> None:
    layout = CASE.replace("-w4", "-kvhnd-w4")
    assert asked_of(lambda case: True, layout).wrong_without("layout")
    assert not asked_of(lambda case: case.kv_layout == "hnd", layout).wrong_without("layout")
    assert not asked_of(lambda case: case.kv_layout == "hnd" or None, layout).wrong_without("layout"), "it raises"
    assert not asked_of(lambda case: True).wrong_without("layout"), "the case has the default layout"
    long = "decode-mha1-d32-fp32-p16-k8192-shuffled-gauss-kvhnd-b1prod"
    assert not asked_of(lambda case: True, long).wrong_without("layout"), "an answer takes too long"


def test_a_pool_beyond_32_bits_is_named_where_a_small_one_is_right() -> None:
    big = "decode-gqa2x2-d32-fp32-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool"
    assert asked_of(lambda case: "bigpool" in case.variants, big).right_without("big pool")
    assert not asked_of(lambda case: True, big).right_without("big pool")
    assert not asked_of(lambda case: "bigpool" in case.variants).right_without("big pool")


def test_a_feature_that_the_case_has_not_is_not_asked_about() -> None:
    backend = Backend(lambda case: True)
    asked = ChangedCases(backend, make_schedule(parse_case(CASE)))  # type: ignore[arg-type]
    assert not any(asked.right_without(name) for name in ("fp8", "data", "layers", "far", "counts"))
    assert backend.asked == []


@pytest.mark.parametrize("odd", range(1, DRAWS + 1))
def test_one_draw_that_says_otherwise_is_enough_to_say_nothing(odd: int) -> None:
    assert not asked_of(lambda case: case.logit_cap > 0 and case.seed != odd).right_without("cap"), "right with it"
    assert not asked_of(lambda case: case.logit_cap > 0 or case.seed == odd).right_without("cap"), "wrong without"


def test_what_raises_is_neither_right_nor_wrong() -> None:
    assert not asked_of(lambda case: None if case.logit_cap else False).right_without("cap")
    assert not asked_of(lambda case: True if case.logit_cap else None).right_without("cap")


def test_nothing_is_asked_for_that_is_not_declared() -> None:
    asked = asked_of(lambda case: case.logit_cap > 0, declared=lambda case: case.logit_cap > 0)
    assert not asked.right_without("cap")


@pytest.mark.parametrize(
    ("prefix", "requests", "asked"), [(8191, 1, True), (8192, 1, False), (1, 64, True), (1, 65, False)]
)
def test_other_cases_are_asked_for_where_an_answer_is_cheap(prefix: int, requests: int, asked: bool) -> None:
    case = f"decode-mha1-d32-fp32-p16-k{prefix}x{requests}-shuffled-gauss-b{requests}prod".replace("x1-", "-")
    assert asked_of(lambda case: True, case).lasting is asked


@pytest.mark.parametrize(("most", "found"), [(15, 0), (16, 16), (17, 17), (48, 48), (63, 63), (64, 0)])
def test_the_number_of_tokens_from_which_on_it_is_wrong_is_found(most: int, found: int) -> None:
    assert asked_of(lambda case: longest(case) > most).right_up_to == found


@pytest.mark.parametrize(
    ("right", "wrong", "found", "runs"),
    [(0, 0, 20, 18), (18, 34, 20, 16), (18, 21, 20, 14), (34, 18, 0, 0), (0, 16, 0, 0)],
)
def test_requests_of_the_wrong_step_bound_the_search(right: int, wrong: int, found: int, runs: int) -> None:
    backend = Backend(lambda case: longest(case) > 20)
    schedule = make_schedule(parse_case(CASE))
    asked = ChangedCases(backend, schedule, right=right, wrong=wrong)  # type: ignore[arg-type]
    assert asked.right_up_to == found
    assert len(backend.asked) == runs
    elsewhere = ChangedCases(Backend(lambda case: longest(case) > 40), schedule, right=18, wrong=34)  # type: ignore[arg-type]
    assert elsewhere.right_up_to == 0, "other draws are right and wrong elsewhere"


def test_a_number_of_tokens_is_no_boundary_where_more_are_right_again() -> None:
    assert asked_of(lambda case: longest(case) % 16 > 0 or longest(case) == 64).right_up_to == 0


@pytest.mark.parametrize("odd", range(1, DRAWS + 1))
def test_every_draw_on_either_side_of_the_boundary_has_to_agree(odd: int) -> None:
    assert asked_of(lambda case: longest(case) > 20 or (longest(case) == 20 and case.seed == odd)).right_up_to == 0
    assert asked_of(lambda case: longest(case) > 20 and not (longest(case) == 21 and case.seed == odd)).right_up_to == 0


def test_sinks_are_left_out_where_they_make_every_length_wrong() -> None:
    asked = asked_of(lambda case: case.sinks or longest(case) > 16)
    assert (asked.right_up_to, asked.right_up_to_without_sinks) == (0, 16)
    assert asked_of(lambda case: longest(case) > 16).right_up_to_without_sinks == 0, "right with them as well"
    assert asked_of(lambda case: case.sinks).right_up_to_without_sinks == 0, "sinks alone are wrong"


@pytest.mark.parametrize(("lens", "found"), [("63.40x2", True), ("40x2.63", False)])
def test_a_request_is_left_out_where_another_one_is_as_long(lens: str, found: bool) -> None:
    assert asked_of(lambda case: case.bs == 3, CASE.replace("63.40x2", lens)).right_with_fewer is found
    assert not asked_of(lambda case: True, CASE).right_with_fewer


def test_a_case_is_cut_to_so_many_tokens_with_its_new_ones() -> None:
    def cut(case: str, most: int) -> Any:
        made = with_keys_up_to(parse_case(case), most)
        return made and (made.prefixes, made.new)

    assert cut("decode-mha2-d32-fp32-p4-k40.9-shuffled-gauss-b2prod", 16) == ((15, 9), ())
    v2 = "draft-extend-v2-mha2-d32-fp32-p4-k40.9-n3a1.2-shuffled-gauss-b2prod"
    assert cut(v2, 16) == ((13, 9), (1, 2)), "all requests have 3 rows"
    assert (cut(v2, 3), cut(v2, 2)) == (((0, 0), (1, 2)), None)
    assert cut("draft-extend-mha2-d32-fp32-p4-k40.9-n3a1.2-shuffled-gauss-b2prod", 10) == ((9, 8), (1, 2))
    assert cut("extend-mha2-d32-fp32-p4-k40.9-n20a20.2-shuffled-gauss-b2prod", 10) == ((0, 8), (10, 2))


# What is said of it.


def evidence(case: str = CASE, used: int | None = None, worst: float = 9.0, **known: Any) -> Evidence:
    """A step that is wrong in one row. ``used``: how many KV tokens of request 0 have weight; None: all.

    ``known``: what ``ChangedCases`` would answer.
    """
    schedule = make_schedule(parse_case(case))
    length = schedule.steps[0].lens[0]
    wanted, has = frozenset(range(length)), frozenset(range(length if used is None else used))
    attended = AttendedKeys(0, 0, has, wanted, frozenset(), wanted, length, {}, None)
    without = known.pop("without", ())
    changed = Of(
        **{"right_up_to": 0, "right_up_to_without_sinks": 0, "right_with_fewer": False, **known},
        right_without=lambda name: name in without,
        right_elsewhere=lambda step: False,
    )
    comparison = wrong_at(schedule, (0, 0, 0), value=worst)
    return Evidence(schedule, comparison, attended, [], in_graph=False, changed=changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cap", "passes without the soft cap"),
        ("sinks", "passes without sinks"),
        ("fp8", "passes with a KV pool of the model's dtype"),
        ("window", "passes without a sliding window"),
        ("data", "the case passes with other values in q, k and v, and fails with those of gauss data"),
        ("layers", "passes with two layers, and fails with 2"),
    ],
)
def test_right_keys_are_right_without_something_that_makes_weights(name: str, said: str) -> None:
    assert hints(evidence(without=(name,))) == [right_without(evidence(without=(name,)))]
    assert said in right_without(evidence(without=(name,)))
    assert right_without(evidence(used=20, without=(name,))) == "", "KV tokens are missing: that is not what makes it"


def test_two_features_without_either_of_which_it_is_right_are_both_named() -> None:
    reported = right_without(evidence(without=("cap", "sinks")))
    assert "passes without the soft cap" in reported
    assert "; the case passes without sinks" in reported


def test_the_data_say_what_to_look_at_where_they_are_there_to_show_it() -> None:
    reported = right_without(evidence(CASE.replace("gauss", "rising_logits"), without=("data",)))
    assert "fails with those of rising_logits data: look at rescaling of partial sums" in reported


def test_missing_keys_follow_from_a_far_context_and_from_uneven_rows() -> None:
    far = "decode-mqa2-d64-bf16-p16-k70-contiguous-gauss-b1prod-far"
    assert (
        "the case passes with a max_context_len that fits the requests, and fails with one of 262,144"
        in right_without(evidence(far, used=48, without=("far",)))
    )
    assert right_without(evidence(far, without=("far",))) == "", "the right keys"
    v1 = "draft-extend-gqa2x2-d32-fp32-p4-k5.9.14-n3a2.3x2-shuffled-gauss-b3prod"
    assert right_without(evidence(v1, used=3, without=("counts",))).endswith(
        "the case passes if every request has 3 new rows, and fails with 2, 3, 3"
    )


def test_a_boundary_of_tokens_is_reported_as_a_merge_or_as_splits_that_are_left_out() -> None:
    assert later_tiles(evidence()) == ""
    merged = later_tiles(evidence(right_up_to=16))
    assert merged.startswith(
        "the case passes if requests are cut to 16 KV tokens, and fails from 17 on: look at rescaling"
    )
    left_out = later_tiles(evidence(right_up_to=16, used=32))
    assert "probably not a wrong length, but later splits or tiles" in left_out
    assert "probably not a wrong length" in later_tiles(evidence(right_up_to=16, used=16)), (
        "other numbers than those of 16"
    )
    full = evidence(right_up_to=16, used=16)
    seen = full.expected.data.visible.clone()
    seen[..., 16:] = False
    out = attend_with_limit(full.schedule, replace(full.expected.data, visible=seen))[0].out
    capacity = replace(full, comparison=Comparison(observed(full.schedule, out), full.expected))
    assert later_tiles(capacity).startswith("KV tokens from 16 on are missing: a fixed capacity of 16, or later splits")
    sinks = later_tiles(evidence(right_up_to_without_sinks=16))
    assert sinks.startswith("without sinks the case passes if requests are cut to 16 KV tokens, and fails from 17 on")
    assert later_tiles(evidence(right_up_to_without_sinks=16, used=32)) == ""
    assert hints(evidence(right_up_to=16)) == [merged]
    assert hints(evidence(right_up_to=16, used=32)) == [left_out]


@pytest.mark.parametrize(("prefixes", "coincide"), [("20.25.31", True), ("20.25.32", False), ("20.25.3", True)])
def test_a_last_page_that_begins_at_the_boundary_in_every_wrong_request_is_named_as_well(
    prefixes: str, coincide: bool
) -> None:
    full = evidence(f"decode-gqa2x2-d32-fp32-p16-k{prefixes}-shuffled-gauss-b4prod", right_up_to=16, used=16)
    data = full.expected.data
    seen = data.visible & (torch.arange(data.visible.shape[-1]) < 16)
    out = attend_with_limit(full.schedule, replace(data, visible=seen))[0].out
    reported = later_tiles(replace(full, comparison=Comparison(observed(full.schedule, out), full.expected)))
    assert reported.startswith("KV tokens from 16 on are missing: a fixed capacity of 16, ")
    assert ("a partly filled last page that is dropped" in reported) is coincide


def test_a_batch_that_is_right_without_one_of_its_like_is_reported_by_its_size() -> None:
    reported = right_with_fewer_requests(evidence(right_with_fewer=True))
    assert "passes with 2 requests, and fails with 3" in reported
    assert right_with_fewer_requests(evidence()) == ""


ALL = {"without": ("cap", "far"), "right_up_to": 16, "right_with_fewer": True}


@pytest.mark.parametrize(
    "other",
    [
        {"changed": None},
        {"in_graph": True},
        {"misrouted": (Of(),)},
        {"reads_foreign": True},
        {"attended": None},
    ],
)
def test_nothing_is_said_where_a_graph_a_place_or_a_slot_is_to_blame_or_nothing_is_known(other: dict[str, Any]) -> None:
    values = {**vars(evidence(**ALL)), **other}
    for pattern in (right_without, later_tiles, right_with_fewer_requests):
        assert pattern(Evidence(**values)) == ""


def test_an_error_that_rounding_makes_is_not_reported_by_other_numbers() -> None:
    small = evidence(**ALL, worst=2e-6)
    assert 1 < small.comparison.margin < 5
    assert right_without(small) == ""


@pytest.mark.parametrize("kind", ["first missing", "one too many", "twice", "elsewhere", "some heads"])
def test_tokens_that_are_wrong_otherwise_than_cut_off_are_no_matter_of_size(kind: str) -> None:
    known = evidence(used=20, **ALL)
    assert known.attended
    other = {
        "first missing": {"used": frozenset(range(1, 20))},
        "one too many": {"used": known.attended.used | {99}},
        "twice": {"doubled": frozenset({1})},
        "elsewhere": {"elsewhere": {"tail": 0.5}},
        "some heads": {"heads": (1,)},
    }[kind]
    attended = replace(known.attended, **other)
    if kind == "first missing":
        attended = replace(attended, used=frozenset(range(44, 64)))
    assert later_tiles(replace(known, attended=attended)) == ""


# What raises.


def raising(case: str, wrong: Wrong, in_graph: bool = False, graph: Any = None) -> str:
    backend = Backend(wrong)
    backend.graph = lambda schedule: graph  # type: ignore[attr-defined]
    return explain_raised(backend, make_schedule(parse_case(case)), in_graph=in_graph)  # type: ignore[arg-type]


RANK = "decode-gqa2x2-d32-fp32-p16-k5.9-shuffled-gauss-w4-cap1.5-sink-layers3from5-b2prod"


@pytest.mark.parametrize(
    ("has", "said"),
    [
        (lambda case: case.layers.first, "the ids of this case's layers begin at 5"),
        (lambda case: case.sinks, "nothing is raised without sinks"),
        (lambda case: case.logit_cap, "nothing is raised without a soft cap"),
        (lambda case: case.window >= 0, "nothing is raised without a sliding window"),
    ],
)
def test_what_raises_with_one_thing_alone_is_reported_by_it(has: Callable[[Case], Any], said: str) -> None:
    assert said in raising(RANK, lambda case: None if has(case) else False)


def test_what_raises_always_or_in_no_eager_run_is_reported_by_nothing() -> None:
    assert raising(RANK, lambda case: None) == ""
    assert raising(RANK, lambda case: False) == ""
    assert raising(RANK, lambda case: False, in_graph=True, graph=object()) == "", "no other mode uses the instance"


def test_what_raises_beside_other_modes_alone_is_reported_by_them() -> None:
    mixed = RANK.replace("-layers3from5", "") + "-multi_mode"
    assert "on an instance by itself nothing is raised" in raising(
        mixed, lambda case: False, in_graph=True, graph=object()
    )
    assert raising(mixed, lambda case: False, in_graph=True) == ""
    assert "on an instance by itself nothing is raised" in raising(mixed, lambda case: False)
