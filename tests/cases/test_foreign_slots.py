"""Places in the KV pool: together with a request's own slots they are all there is, and no slot is in two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.steps.foreign_slots import PLACES, marked_slots, place_pattern, tail_slots, values_of_place
from attn_testkit.steps.schedule import Request, make_schedule

CASES = [
    "decode-gqa3x2-d32-fp16-p4-k3.9.6-shuffled-gauss-b4prod",
    "draft-extend-gqa3x2-d32-fp16-p1-k3.9-n4a1.3-reversed-gauss-b3stale",
    "target-verify-mha2-d32-bf16-p16-k0.17-t0.0.1-interleaved-gauss-b2prod",
]


@pytest.mark.parametrize("case_id", CASES)
def test_places_and_own_slots_divide_the_pool(case_id: str) -> None:
    schedule = make_schedule(parse_case(case_id))
    page, slots = schedule.case.page_size, (schedule.num_pages + 1) * schedule.case.page_size
    for step in schedule.steps:
        for index in range(step.bs):
            found = [s for name in PLACES for s in marked_slots(step, place_pattern(index, name), page, slots).tolist()]
            # The live keys of others are marked by their values, not by unowned slots.
            found += [int(s) for request in step.requests for s in request.slots]
            assert sorted(found) == list(range(slots))
            assert marked_slots(step, place_pattern(index, "page0"), page, slots).tolist() == list(range(page))


@pytest.mark.parametrize(("used", "tail"), [(1, [9, 10, 11]), (3, [11]), (4, []), (5, [21, 22, 23]), (8, [])])
def test_a_tail_is_what_is_left_of_the_last_page(used: int, tail: list[int]) -> None:
    slots = np.array([8, 9, 10, 11, 20, 21, 22, 23])[:used]
    assert tail_slots(Request(used - 1, 1, 1, slots), 4).tolist() == tail


@pytest.mark.parametrize("name", PLACES)
def test_live_keys_have_a_value_of_one_where_those_of_others_are_asked_about_and_of_zero_else(name: str) -> None:
    drawn = torch.full((2, 3, 5, 1, 4), 7.0)
    found = values_of_place(drawn, place_pattern(1, name))
    want = torch.zeros_like(drawn)
    if name == "others":
        want[:, [0, 2]] = 1.0
    assert torch.equal(found, want)
    assert drawn.unique().tolist() == [7.0]
