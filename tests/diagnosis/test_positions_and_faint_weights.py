"""Positions that are another request's, weights that are too little to be seen, and zeros: told, and not too often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from test_other_places_by_hand import attended, evidence, right, schedule_of, with_data
from wrong_steps import assumed

from attn_testkit.diagnosis.attended_keys import AttendedKeys, _read, _right_dims
from attn_testkit.diagnosis.hints import hints, keys, rows
from attn_testkit.diagnosis.hints.assumed_keys import positions_of_another_request, rows_without_prefix
from attn_testkit.diagnosis.hints.assumed_slots import other_query_heads
from attn_testkit.diagnosis.hints.evidence import SMALL_ERROR
from attn_testkit.diagnosis.hints.heads import some_heads
from attn_testkit.diagnosis.hints.keys import key_range, stored_elsewhere, weighs_a_little
from attn_testkit.diagnosis.hints.rows import uneven_offsets
from attn_testkit.diagnosis.hints.values import last_rows_right, nothing_computed
from attn_testkit.diagnosis.misrouted_rows import MisroutedRow
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule

EXTEND = schedule_of("extend-gqa2x2-d32-fp32-p4-k3.9.5-n12a12.1.3-shuffled-gauss-b3prod")
WINDOW = schedule_of("extend-gqa2x2-d32-fp32-p4-k20.9.5-n4a4.2.3-shuffled-gauss-w4-b3prod")
CAP = schedule_of("decode-gqa2x2-d32-fp32-p4-k40.9-shuffled-gauss-cap1.5-b2prod")
PLAIN = schedule_of("decode-gqa2x2-d32-fp32-p4-k40.9-shuffled-gauss-b2prod")
FEW = schedule_of("decode-gqa2x2-d32-fp32-p16-k40.9-shuffled-gauss-w11-b2prod")


# Positions.


def with_starts(schedule: Schedule, start: list[int], causal: bool = True) -> torch.Tensor:
    """What a backend gives whose rows have positions from ``start`` [B] on."""
    data = expect(schedule, schedule.steps[0]).data
    positions = torch.tensor(start)[:, None] + torch.arange(data.query_positions.shape[1])
    own = torch.arange(data.visible.shape[-1]) < torch.tensor(schedule.steps[0].lens)[:, None, None]
    seen = (data.key_positions[:, None] <= positions[:, :, None]) & own
    return with_data(schedule, query_positions=positions, **({"visible": seen} if causal else {})).nan_to_num(0.0)


def reported(schedule: Schedule, out: torch.Tensor, **more: Any) -> str:
    return positions_of_another_request(
        evidence(schedule, out, **{"attended": attended(schedule, 1, used=(0,)), **more})
    )


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ([3, 3, 3], "right if positions are counted from the prefix of request 0 in every request"),
        ([5, 5, 5], "right if positions are counted from the prefix of request 2 in every request"),
        ([9, 9, 9], "right if positions are counted from the longest prefix in every request"),
        ([3, 14, 12], "right if positions are counted from the end of the longest request in every request"),
        ([4, 9, 5], ""),
        ([20, 20, 20], ""),
        ([3, 9, 5], ""),
        ([0, 0, 0], ""),
    ],
)
def test_positions_that_are_counted_from_elsewhere_are_named(start: list[int], text: str) -> None:
    said = reported(EXTEND, with_starts(EXTEND, start))
    assert text in said
    assert bool(said) is bool(text)


def told_without_prefix(schedule: Schedule, out: torch.Tensor, **more: Any) -> str:
    """Row 2 of request 0 is asked, and attended to KV tokens 0..2."""
    asked = {"attended": attended(schedule, 0, row=2, used=range(3)), **more}
    return rows_without_prefix(evidence(schedule, out, **asked))


def test_rows_that_count_their_keys_from_the_first_one_are_named_whatever_else_they_are_alike() -> None:
    out = with_starts(EXTEND, [0, 0, 0])
    said = told_without_prefix(EXTEND, out)
    assert said.endswith("the result is right if row i attends to KV tokens 0..i, as if there were no prefix")
    asked = attended(EXTEND, 0, row=2, used=range(3))
    misrouted = tuple(MisroutedRow(0, row, 1, row) for row in range(2))
    found = evidence(EXTEND, out, attended=asked, misrouted=misrouted)
    assert hints(found)[0] == said
    # Requests whose rows take another path are right.
    out[:, 12:] = right(EXTEND)[:, 12:]
    assert told_without_prefix(EXTEND, out) == said


def test_rows_that_count_from_elsewhere_or_are_the_first_of_theirs_are_not_reported_as_without_prefix() -> None:
    out = with_starts(EXTEND, [0, 0, 0])
    assert told_without_prefix(EXTEND, out, attended=None) == ""
    assert told_without_prefix(EXTEND, out, in_graph=True) == ""
    assert told_without_prefix(EXTEND, out, attended=attended(EXTEND, 0, row=2, used=range(4))) == ""
    assert told_without_prefix(EXTEND, with_starts(EXTEND, [1, 0, 0])) == "", "one row is right for something else"
    first = right(EXTEND)
    first[:, 0] = out[:, 0]
    alone = attended(EXTEND, 0, row=0, used=(0,))
    assert told_without_prefix(EXTEND, first, attended=alone) == "", "KV token 0 alone has many causes"
    first[:, 1] = out[:, 1]
    assert told_without_prefix(EXTEND, first, attended=alone)


def test_positions_that_windows_alone_go_by_are_named_and_no_window_at_all_is_none() -> None:
    said = reported(WINDOW, with_starts(WINDOW, [20, 20, 20], causal=False))
    assert "if the positions by which windows begin are counted from the prefix of request 0 or the" in said
    early = reported(WINDOW, with_starts(WINDOW, [9, 9, 9], causal=False))
    assert "counted from the prefix of request 1" not in early, "of three requests the second is none of those asked"
    no_prefix = schedule_of("extend-gqa2x2-d32-fp32-p4-k20.9.5-n12a12.2.3-shuffled-gauss-w4-b3prod")
    said = reported(no_prefix, with_starts(no_prefix, [0, 0, 0], causal=False))
    assert "begin are counted from 0, as if there were no prefix in every request" in said
    assert reported(no_prefix, with_starts(no_prefix, [-99, -99, -99], causal=False)) == ""


def test_windows_of_all_rows_that_are_the_last_rows_are_named() -> None:
    data = expect(WINDOW, WINDOW.steps[0]).data
    last = torch.tensor([[23], [10], [7]]).expand_as(data.query_positions)
    out = with_data(WINDOW, query_positions=last).nan_to_num(0.0)
    assert reported(WINDOW, out).startswith("all rows of a request use the window of its last row")
    out[:, 4] = right(WINDOW)[:, 4]
    assert reported(WINDOW, out) == "", "a row that is right is not"


def test_what_explains_the_wrong_rows_and_not_the_right_ones_is_not_reported() -> None:
    out = with_starts(EXTEND, [3, 3, 3])
    assert reported(EXTEND, out)
    out[:, 12] = right(EXTEND)[:, 12]
    assert reported(EXTEND, out) == "", "request 1 is right"


def test_of_one_row_a_request_another_position_is_another_length() -> None:
    decode = schedule_of("decode-gqa2x2-d32-fp32-p4-k3.9.5-shuffled-gauss-b3prod")
    assert reported(decode, with_starts(decode, [3, 3, 3])) == ""


def test_positions_are_asked_about_where_a_row_read_other_keys_than_its_own() -> None:
    out = with_starts(EXTEND, [3, 3, 3])
    assert reported(EXTEND, out, attended=None) == ""
    assert reported(EXTEND, out, attended=attended(EXTEND, 1)) == ""


def test_positions_that_are_named_leave_strides_and_lengths_unsaid() -> None:
    found = evidence(EXTEND, with_starts(EXTEND, [3, 3, 3]), attended=attended(EXTEND, 1, used=range(4)))
    assert hints(found) == [positions_of_another_request(found)]


@pytest.mark.parametrize(
    ("stride", "row", "used", "leads_there"),
    [(3, 0, 5, True), (3, 0, 4, True), (3, 0, 3, False), (3, 1, 5, True), (3, 1, 4, False), (2, 0, 5, False)],
)
def test_a_row_that_read_its_own_keys_alone_is_a_strides_where_that_leads_to_as_many(
    stride: int, row: int, used: int, leads_there: bool
) -> None:
    # Counts are 4, 2, 3: under a stride of 3 the flat rows 4 and 5 are the second and third of request 1, whose prefix
    # is 3; under one of 2, row 4 is request 2's.
    schedule = schedule_of("extend-gqa2x2-d32-fp32-p4-k3x2.5-n4a4.2.3-shuffled-gauss-b3prod")
    found = evidence(schedule, right(schedule), attended=attended(schedule, 1, row, used=range(used)))
    assert rows._as_under(stride, found, found.attended) is leads_there


def test_a_stride_that_leads_elsewhere_than_the_row_read_is_not_blamed() -> None:
    schedule = schedule_of("extend-gqa2x2-d32-fp32-p4-k3x2.5-n4a4.2.3-shuffled-gauss-b3prod")
    out = right(schedule)
    out[:, 4:] += 9.0
    misrouted = attended(schedule, 2, used=())
    assert "a uniform stride of 4 gets wrong" in uneven_offsets(evidence(schedule, out, attended=misrouted))
    own = replace(attended(schedule, 2, used=range(2)), total=1.0)
    assert uneven_offsets(evidence(schedule, out, attended=own)) == ""


# Weights.


def read(masked: float, beyond: float = 0.0) -> AttendedKeys:
    weights = {0: 0.4, 1: 0.4, 2: masked, 3: beyond}
    return _read(0, 0, weights, frozenset({0, 1}), {}, None)


@pytest.mark.parametrize(
    ("weight", "used", "faint"),
    [(0.0, False, False), (0.008, False, False), (0.0081, False, True), (0.1, False, True), (0.101, True, False)],
)
def test_a_masked_token_is_faint_between_rounding_and_a_quarter(weight: float, used: bool, faint: bool) -> None:
    found = read(weight)
    assert (2 in found.used) is used
    assert (2 in found.faint) is faint
    assert found.right is not (used or faint)
    assert found.used >= {0, 1}


def test_what_is_faint_is_said_with_its_tokens_and_its_largest_part() -> None:
    found = read(0.04, 0.08)
    assert found.text.endswith("KV tokens 2..3 should have no weight, but have 0.2 of the weight of the others")
    assert weighs_a_little(evidence(CAP, right(CAP), attended=found)) == (
        "masked KV tokens have 0.2 of the weight of the others: the soft cap probably comes after the mask, but "
        "must come before it (a capped minus infinity is -logit_cap)"
    )
    assert "a mask that adds a number" in weighs_a_little(evidence(PLAIN, right(PLAIN), attended=found))
    assert weighs_a_little(evidence(CAP, right(CAP), attended=read(0.0))) == ""
    assert weighs_a_little(evidence(CAP, right(CAP))) == ""


def test_rows_whose_masked_tokens_weigh_a_little_do_not_share_anything() -> None:
    schedule = schedule_of("extend-gqa2x2-d32-fp32-p4-k3.9.5-n4a4.2.3-shuffled-gauss-b3prod")
    out = right(schedule)
    out[:, [0, 1, 2]] += 9.0
    mine = attended(schedule, 0)
    assert last_rows_right(evidence(schedule, out, attended=mine))
    assert last_rows_right(evidence(schedule, out, attended=replace(mine, faint={6: 0.2}))) == ""


@pytest.mark.parametrize(("first", "asked"), [(15, 32), (16, 16), (31, 31), (0, 32)])
def test_dims_that_are_not_computed_name_no_token_where_at_least_half_are_right(first: int, asked: int) -> None:
    out = right(PLAIN)
    out[1, :, :, first:] = 9.0
    found = evidence(PLAIN, out).comparison
    assert _right_dims(found, 1, 32) == asked
    assert _right_dims(found, 0, 32) == 32, "nothing is wrong in this layer"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ([28], "one KV token before the window is visible"),
        ([27, 28], "KV tokens before the window are visible"),
        (range(16), "KV tokens up to 15 have weight, but 16..28 between them and the window from 29 on have none"),
        (range(8, 16), "KV tokens up to 15 have weight"),
        (range(15), "KV tokens before the window are visible"),
        (range(17), "KV tokens before the window are visible"),
    ],
)
def test_what_lies_before_a_window_is_reported_by_what_lies_between(extra: Any, text: str) -> None:
    due = range(29, 41)
    mine = attended(FEW, 0, used={*extra, *due}, wanted=due)
    told_so = key_range(evidence(FEW, right(FEW), attended=mine))
    assert text in told_so


def test_tokens_between_that_were_not_asked_about_are_not_called_weightless() -> None:
    due = range(29, 41)
    mine = replace(attended(FEW, 0, used={*range(16), *due}, wanted=due), looked_at=frozenset({*range(20), *due}))
    assert key_range(evidence(FEW, right(FEW), attended=mine)) == "KV tokens before the window are visible"


# Zeros.


def test_zeros_in_windowed_layers_alone_are_windows_that_lie_nowhere() -> None:
    out = right(FEW)
    out[1, 0] = 0.0
    assert "only the layers with a sliding window (11) are wrong, and all zeros" in nothing_computed(evidence(FEW, out))
    out[0, 1] = 0.0
    assert nothing_computed(evidence(FEW, out)).startswith("the wrong rows were never computed (they are all zeros)")
    plain = right(PLAIN)
    plain[1, 0] = 0.0
    assert nothing_computed(evidence(PLAIN, plain)).endswith("all zeros in every layer but the first")


def test_zeros_behind_other_steps_may_have_been_written_over() -> None:
    out = right(PLAIN)
    out[:, 1] = 0.0
    said = nothing_computed(evidence(PLAIN, out, right_when_fresh=True))
    assert "the wrong rows are all zeros, and right without the steps before it" in said
    said = nothing_computed(evidence(PLAIN, torch.zeros_like(out), right_when_fresh=True))
    assert "the output is all zeros, in every layer, and right without the steps before it" in said


def test_zeros_that_were_merged_are_weights_that_are_lost() -> None:
    parts = schedule_of("decode-gqa2x2-d64-bf16-p4-k11.1-shuffled-gauss-lsetokens3-b2prod")
    out = right(parts)
    out[:, 0] = 0.0
    assert nothing_computed(evidence(parts, out)).endswith("the result of merge_state is all zeros")


def test_rows_of_zeros_are_not_right_for_any_mistake() -> None:
    out = with_data(PLAIN, q=expect(PLAIN, PLAIN.steps[0]).data.q[:, :, [0, 1, 2, 2]])
    assert assumed(evidence(PLAIN, out)).endswith("right with the query of head 2 in head 3")
    out[0, 0] = 0.0
    assert assumed(evidence(PLAIN, out)) == ""


def test_where_the_error_is_small_another_head_may_be_near_by_chance() -> None:
    want = expect(PLAIN, PLAIN.steps[0])
    misrouted = with_data(PLAIN, q=want.data.q[:, :, [0, 1, 2, 2]])
    found = evidence(PLAIN, misrouted)
    assert found.comparison.margin > SMALL_ERROR
    for margin, said in ((SMALL_ERROR, True), (SMALL_ERROR - 0.1, False)):
        with mock.patch.dict(vars(found.comparison), margin=margin):
            assert bool(other_query_heads(found)) is said


# Heads, and what is stored.


@pytest.mark.parametrize(("others", "strided"), [(0.89, False), (0.9, True)])
def test_heads_that_read_another_requests_tokens_are_at_a_stride_of_rows(others: float, strided: bool) -> None:
    mine = attended(PLAIN, 0, used=(), heads=(0, 1), shape=PLAIN.case.head_shape)
    found = evidence(PLAIN, right(PLAIN), attended=replace(mine, elsewhere={"others": others}))
    assert ("rows are 4 heads apart" in some_heads(found)) is strided
    if strided:
        assert sum("none of its own KV tokens" in text for text in hints(found)) == 0


@pytest.mark.parametrize(("total", "was_read"), [(1.0, False), (0.986, False), (0.985, True)])
def test_a_token_whose_weight_is_lost_was_read_and_one_that_the_others_make_up_for_was_not(
    total: float, was_read: bool
) -> None:
    # Without 1 of 35 KV tokens the weights sum to 34 / 35 = 0.971 where it was read, and half of that is 0.986.
    schedule = schedule_of("decode-gqa2x2-d32-fp32-p4-k34.9-shuffled-gauss-b2prod")
    out = right(schedule)
    out[:, 0] += 9.0
    mine = replace(attended(schedule, 0, used=range(34)), total=total)
    found = evidence(schedule, out, attended=mine)
    assert mine.normalised
    assert keys._not_read(mine) is not was_read
    assert stored_elsewhere(found) == "", "the pool was not looked at"
