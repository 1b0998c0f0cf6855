"""The order in which lanes take groups of case-runs: a costly one before its turn, as late as it may be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.running.case_runs.waiting import Waiting, groups_of
from attn_testkit.running.planning.long_cases import effort_of
from attn_testkit.running.planning.request import Item

SMALL = [f"decode-gqa2x2-d64-bf16-p16-k{keys}-shuffled-gauss-b1prod" for keys in range(3, 60)]
GRAD_OFF = [case for case in SMALL if not parse_case(case).inference_mode]
INFERENCE = [case for case in SMALL if parse_case(case).inference_mode]
COSTLY = [f"decode-gqa2x2-d64-bf16-p16-k{keys}-shuffled-gauss-b1prod" for keys in range(66_000, 66_020)]
UNDER_GRAD_OFF = next(case for case in COSTLY if not parse_case(case).inference_mode)
UNDER_INFERENCE = next(case for case in COSTLY if parse_case(case).inference_mode)


def taken(cases: Sequence[str], lanes: int, *, early: bool = True, backends: Sequence[str] = ("m:A",)) -> list[str]:
    """The cases in the order in which lanes that are all as fast take them."""
    items = [Item(spec, "decode", execution, case) for spec in backends for case in cases for execution in ("e", "g")]
    waiting = Waiting(groups_of(items), lanes, early=early)
    coming, order = {index: waiting.of_lane() for index in range(lanes)}, []
    while coming:
        for index in list(coming):
            for item, _ in coming[index]:
                order.append(f"{item.backend} {item.execution} {item.case}" if len(backends) > 1 else item.case)
                break
            else:
                del coming[index]
    assert len(order) == len(items)
    return list(dict.fromkeys(order))


def test_a_long_request_is_costlier_than_a_short_one_and_a_large_state_than_a_small_one() -> None:
    assert effort_of(parse_case(SMALL[0])) < 1.1
    assert effort_of(parse_case(COSTLY[0])) > 100
    state = "target-verify-gdn4x2-d{0}-fp16-p16-k{1}-chain4-shuffled-mild_decay-k{0}w4s32-b40prod"
    small, large = (effort_of(parse_case(state.format(*of))) for of in ((64, "3.20.9"), (128, "3x20.9x14")))
    assert large > 20 * small


def test_a_costly_case_at_the_end_is_taken_before_its_turn_and_not_before_each_lane_has_its_first() -> None:
    order = taken([*GRAD_OFF, UNDER_GRAD_OFF], 4)
    assert order.index(UNDER_GRAD_OFF) == 4
    assert [case for case in order if case != UNDER_GRAD_OFF] == GRAD_OFF


def test_simple_cases_come_first_while_enough_is_left_for_the_other_lanes() -> None:
    several = [case for case in COSTLY if not parse_case(case).inference_mode]
    long_before = 30 * several
    items = [Item("m:A", "decode", "eager", case) for case in (*long_before, several[-1])]
    waiting = Waiting([group for each in items for group in groups_of([each])], 2, early=True)
    assert [item.case for item, _ in waiting.of_lane()][: len(several)] == several


@pytest.mark.parametrize(("lanes", "early"), [(1, True), (4, False)])
def test_one_lane_and_a_run_with_an_order_of_its_own_keep_the_order(lanes: int, early: bool) -> None:
    cases = [*GRAD_OFF, UNDER_GRAD_OFF]
    assert taken(cases, lanes, early=early) == cases


def test_no_worker_goes_back_from_inference_mode_or_to_another_backend_for_it() -> None:
    order = taken([*GRAD_OFF, *INFERENCE, UNDER_INFERENCE], 4)
    assert set(order[: len(GRAD_OFF)]) == set(GRAD_OFF)
    assert order[len(GRAD_OFF)] == UNDER_INFERENCE
    of_two = taken([*GRAD_OFF[:9], UNDER_GRAD_OFF], 2, backends=("m:A", "m:B"))
    assert [each.startswith("m:A") for each in of_two] == [True] * 20 + [False] * 20
