"""Rows that are right for the length of another request are named as such, unless a length is off by a constant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_other_places_by_hand import attended, evidence, right, schedule_of, with_data

from attn_testkit.diagnosis.hints import hints
from attn_testkit.diagnosis.hints.assumed_keys import lengths_of_others
from attn_testkit.diagnosis.hints.keys import key_range
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule

DECODE = schedule_of("decode-gqa2x2-d32-fp32-p4-k3.9.20.5.40-shuffled-gauss-b5prod")
"""4, 10, 21, 6 and 41 KV tokens."""
EXTEND = schedule_of("extend-gqa2x2-d32-fp32-p4-k9.20.3.2-n3a1x2.2.3-shuffled-gauss-b4prod")
"""10, 21, 5 and 5 KV tokens, of which 1, 1, 2 and 3 are new."""


def with_lens(schedule: Schedule, lens: list[int]) -> torch.Tensor:
    """What a backend gives that takes these for the lengths."""
    data, requests = expect(schedule, schedule.steps[0]).data, schedule.steps[0].requests
    first = torch.tensor([length - request.new for length, request in zip(lens, requests, strict=True)])
    positions = first[:, None] + torch.arange(data.query_positions.shape[1])
    seen = data.key_positions[:, None] <= positions[:, :, None]
    return with_data(schedule, query_positions=positions, visible=seen).nan_to_num(0.0)


def reported(schedule: Schedule, lens: list[int], **more: Any) -> str:
    asked = {"attended": attended(schedule, 1, used=(0,)), **more}
    return lengths_of_others(evidence(schedule, with_lens(schedule, lens), **asked))


@pytest.mark.parametrize(
    ("lens", "text"),
    [
        ([4, 4, 4, 4, 4], "every wrong request is right with the length of request 0, 4 (or its new rows"),
        ([4, 4, 10, 6, 21], "right with lengths of other requests, request 1 with that of request 0, 4, request 2"),
        ([4, 10, 6, 6, 4], "right with lengths of other requests, request 2 with that of request 3, 6, request 4"),
        ([4, 10, 21, 6, 10], ""),
        ([4, 9, 20, 6, 40], ""),
        ([4, 8, 10, 6, 41], ""),
        ([1, 1, 1, 1, 1], ""),
    ],
    ids=["first", "others", "later", "one alone", "off by one", "one of nobody", "no prefix"],
)
def test_lengths_of_others_are_named_where_each_wrong_request_has_one(lens: list[int], text: str) -> None:
    said = reported(DECODE, lens)
    assert text in said
    assert bool(said) is bool(text)


def test_all_longer_ones_cut_to_a_tile_are_no_length_of_another() -> None:
    for last, said in ((15, False), (14, True)):
        schedule = schedule_of(f"decode-gqa2x2-d32-fp32-p4-k{last}.29.40.5-shuffled-gauss-b4prod")
        lens = [last + 1, last + 1, last + 1, 6]
        assert bool(reported(schedule, lens)) is said


def test_new_rows_are_the_least_that_a_length_may_be() -> None:
    assert "every wrong request is right with the length of request 2, 5" in reported(EXTEND, [5, 5, 5, 5])
    assert reported(EXTEND, [1, 1, 2, 3]) == "", "all have their new rows alone: the prefix is lost"


def test_nothing_is_asked_where_something_else_is_known_or_numbers_are_missing() -> None:
    lens = [4, 4, 4, 4, 4]
    assert reported(DECODE, lens, attended=None)
    assert reported(DECODE, lens, attended=attended(DECODE, 1)) == "", "the right KV tokens"
    assert reported(DECODE, lens, attended=replace(attended(DECODE, 1, used=(0,)), elsewhere={"others": 1.0})) == ""
    assert reported(DECODE, lens, attended=attended(DECODE, 1, used=(0,), heads=(1,))) == ""
    assert lengths_of_others(evidence(DECODE, right(DECODE))) == ""
    spoilt = with_lens(DECODE, lens)
    spoilt[0, 1, 0, 0] = torch.nan
    assert lengths_of_others(evidence(DECODE, spoilt)) == ""
    tree = schedule_of("target-verify-gqa2x2-d32-fp32-p4-k9.20-t0.0.1-shuffled-gauss-b2prod")
    assert lengths_of_others(evidence(tree, right(tree) + 1)) == ""


def test_one_that_is_named_is_guessed_at_by_no_other_hint() -> None:
    found = evidence(DECODE, with_lens(DECODE, [4] * 5), attended=attended(DECODE, 1, used=range(4)))
    assert hints(found) == [lengths_of_others(found)]


@pytest.mark.parametrize(("used", "whose"), [(12, 1), (8, 3), (4, 0), (16, None), (40, None)])
def test_what_the_pages_of_another_request_hold_is_named(used: int, whose: int | None) -> None:
    found = evidence(DECODE, right(DECODE), attended=attended(DECODE, 4, used=range(used)))
    said = (
        f"The pages of request {whose} have room for {used} KV tokens, so its length or its part of a schedule is "
        "probably used"
    )
    assert key_range(found).endswith(said) is (whose is not None)
    assert ("a schedule" in key_range(found)) is (whose is not None)
