"""Heads and rows that are right for another place, or for what one sees: named, and not where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from wrong_steps import assumed, observed

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.comparison import BITS
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import Evidence, hints
from attn_testkit.diagnosis.hints.assumed_keys import entered_at_query_offsets, rows_of_a_later_tile
from attn_testkit.diagnosis.hints.heads import heads_not_computed, results_of_other_heads, some_heads
from attn_testkit.diagnosis.hints.keys import key_range, own_rows_mixed, window_of_another_layer
from attn_testkit.diagnosis.hints.values import last_rows_right, nothing_computed
from attn_testkit.diagnosis.misrouted_rows import MisroutedRow
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.steps.schedule import Schedule, make_schedule


def schedule_of(case: str) -> Schedule:
    return make_schedule(parse_case(case))


DECODE = schedule_of("decode-gqa3x2-d32-fp32-p4-k40.9.21-shuffled-gauss-b4prod")
ROWS = schedule_of("draft-extend-v2-gqa2x2-d32-fp32-p4-k5.9.14-n4a1x3-shuffled-gauss-b3prod")


def right(schedule: Schedule) -> torch.Tensor:
    """[L, T, Hq, D]."""
    return expect(schedule, schedule.steps[0]).attention.float().clone()


def evidence(schedule: Schedule, out: torch.Tensor, **more: Any) -> Evidence:
    comparison = Comparison(
        observed(schedule, out, replay=more.pop("replay", False)), expect(schedule, schedule.steps[0])
    )
    return Evidence(schedule, comparison, **{"attended": None, "passed": [], "in_graph": False, **more})


def attended(
    schedule: Schedule, request: int, row: int = 0, used: Any = None, wanted: Any = None, **more: Any
) -> AttendedKeys:
    length = schedule.steps[0].lens[request]
    seen = expect(schedule, schedule.steps[0]).data.visible[request, row].nonzero().flatten().tolist()
    due = frozenset(seen if wanted is None else wanted)
    has = due if used is None else frozenset(used)
    elsewhere = more.pop("elsewhere_of", {})
    return AttendedKeys(request, row, has, due, frozenset(), frozenset(range(length)), length, elsewhere, None, **more)


def with_data(schedule: Schedule, **changes: Any) -> torch.Tensor:
    """Output of a backend that attends to other data."""
    data = expect(schedule, schedule.steps[0]).data
    return attend_with_limit(schedule, replace(data, **changes))[0].out


# Heads.


def test_heads_of_zeros_are_computed_by_nothing() -> None:
    out = right(DECODE)
    out[:, :, 4:] = 0.0
    found = evidence(DECODE, out, attended=attended(DECODE, 0, used=(), heads=(4, 5)))
    assert heads_not_computed(found).endswith(": heads 4-5 of 6 are all zeros, in every row")
    assert hints(found) == [heads_not_computed(found)]
    out = right(DECODE)
    out[:, :, 5] = 0.0
    assert heads_not_computed(evidence(DECODE, out)).endswith(": head 5 of 6 is all zeros, in every row")


def test_zeros_of_all_heads_of_some_rows_or_beside_numbers_are_no_heads_that_are_left_out() -> None:
    whole, some, other = right(DECODE), right(DECODE), right(DECODE)
    whole[:] = 0.0
    some[:, 0, 5] = 0.0
    other[:, :, 5] = 0.0
    other[0, 0, 4] += 9.0
    for out in (whole, some, other, right(DECODE)):
        found = evidence(DECODE, out, attended=attended(DECODE, 0, used=(), heads=(5,)))
        assert heads_not_computed(found) == ""
        assert some_heads(found)


def test_results_that_lie_at_another_stride_of_heads_are_named() -> None:
    schedule = schedule_of("decode-mqa4-d32-fp32-p4-k40.9.21-shuffled-gauss-b4prod")
    want, out = right(schedule), torch.full_like(right(schedule), torch.nan)
    out.view(BITS[4])[:] = -1
    for row in range(3):
        for head in range(4):
            out.flatten(1, 2)[:, row + head] = want[:, row, head]
    found = evidence(schedule, out)
    assert results_of_other_heads(found).endswith("request 0 head 1 holds the result of request 1 head 0 and so on")


def test_results_of_other_heads_are_not_reported_of_noise_of_one_row_or_where_a_row_is_known() -> None:
    noise = right(DECODE)
    noise[:, 0] += 9.0
    same_row = right(DECODE)
    same_row[:, 0, [0, 1]] = same_row[:, 0, [1, 0]]
    rows = right(DECODE)
    rows[:, [0, 1]] = rows[:, [1, 0]]
    assert results_of_other_heads(evidence(DECODE, noise)) == ""
    assert results_of_other_heads(evidence(DECODE, same_row)) == "", "in one row: a matter of heads, not of strides"
    assert results_of_other_heads(evidence(DECODE, rows))
    assert results_of_other_heads(evidence(DECODE, rows, misrouted=(MisroutedRow(0, 0, 1, 0),))) == ""
    rows[0, 2] += 9.0
    assert results_of_other_heads(evidence(DECODE, rows)) == "", "one row is nobody's"


def test_the_query_of_another_head_is_named_head_by_head() -> None:
    q = expect(DECODE, DECODE.steps[0]).data.q
    out = with_data(DECODE, q=q[:, :, [0, 1, 2, 4, 5, 5]])
    assert assumed(evidence(DECODE, out)).endswith("right with the query of head 4 in head 3, of head 5 in head 4")
    many = with_data(DECODE, q=q[:, :, [1, 2, 3, 4, 5, 0]])
    assert "of head 3 in head 2 and so on" in assumed(evidence(DECODE, many))


def test_heads_that_are_nobodys_are_not_reported_by_those_that_are_somebodys() -> None:
    out = with_data(DECODE, q=expect(DECODE, DECODE.steps[0]).data.q[:, :, [0, 1, 2, 4, 5, 5]])
    out[0, 0, 0] += 9.0
    assert assumed(evidence(DECODE, out)) == ""


# What rows see.


def tiles_of(tile: int) -> torch.Tensor:
    data = expect(ROWS, ROWS.steps[0]).data
    first = torch.arange(4) % tile
    return with_data(ROWS, visible=data.visible[:, first], query_positions=data.query_positions[:, first])


@pytest.mark.parametrize(
    ("tile", "said"),
    [
        (
            1,
            "(tiles of 1 row): the result is right if every row of a request sees what its first one should",
        ),
        (2, "of the request (tiles of 2 rows): the result is right if row i sees what row i % 2 should"),
    ],
)
def test_rows_that_are_counted_from_their_tile_are_reported_by_it(tile: int, said: str) -> None:
    short = attended(ROWS, 0, tile, used=range(5))
    found = evidence(ROWS, tiles_of(tile), attended=short)
    assert rows_of_a_later_tile(found).endswith(said)
    assert hints(found) == [rows_of_a_later_tile(found)]
    assert rows_of_a_later_tile(replace(found, attended=attended(ROWS, 0))) == "", "the right KV tokens"
    assert rows_of_a_later_tile(replace(found, in_graph=True)) == ""
    assert rows_of_a_later_tile(replace(found, misrouted=(MisroutedRow(0, 0, 1, 0),))) == ""


def test_a_length_that_is_off_in_every_row_is_no_tile() -> None:
    data = expect(ROWS, ROWS.steps[0]).data
    shorter = data.visible.clone()
    shorter[:, :, :1] = False
    found = evidence(ROWS, with_data(ROWS, visible=shorter), attended=attended(ROWS, 0, 1, used=range(1, 7)))
    assert rows_of_a_later_tile(found) == ""


def entered(schedule: Schedule, starts: list[int]) -> torch.Tensor:
    data, lens = expect(schedule, schedule.steps[0]).data, schedule.steps[0].lens
    changed = {}
    for name in ("stored_keys", "stored_values"):
        stored = getattr(data, name)
        flat = torch.cat([stored[:, i, :n] for i, n in enumerate(lens)], 1)
        changed[name] = stored.clone()
        for request, (start, length) in enumerate(zip(starts, lens, strict=True)):
            changed[name][:, request, :length] = flat[:, start : start + length]
    return with_data(schedule, **changed)


def test_a_list_of_tokens_that_is_entered_at_query_offsets_is_reported_as_that() -> None:
    theirs = (MisroutedRow(1, 0, 0, None, 10),)
    found = evidence(DECODE, entered(DECODE, [0, 1, 2]), misrouted=theirs)
    assert "right for KV tokens from the offset of a" in entered_at_query_offsets(found)
    assert hints(found) == [entered_at_query_offsets(found)]
    assert entered_at_query_offsets(replace(found, misrouted=())) == "", "nothing of another request was seen"
    other = replace(attended(DECODE, 1), elsewhere={"others": 1.0})
    assert entered_at_query_offsets(replace(found, misrouted=(), attended=other))


def test_other_offsets_into_the_list_are_not_reported_as_those_of_queries() -> None:
    theirs = (MisroutedRow(1, 0, 0, None, 10),)
    assert entered_at_query_offsets(evidence(DECODE, entered(DECODE, [0, 2, 4]), misrouted=theirs)) == ""
    noise = right(DECODE)
    noise[:, 1] += 9.0
    assert entered_at_query_offsets(evidence(DECODE, noise, misrouted=theirs)) == ""


def wrong_rows(*rows: int) -> torch.Tensor:
    out = right(ROWS)
    out[:, list(rows)] += 9.0
    return out


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((0, 1, 2), True),
        ((0, 1, 2, 4, 5, 6), True),
        ((0, 1, 2, 3), False),
        ((0, 1), False),
        ((0, 1, 2, 7), False),
    ],
)
def test_the_last_row_of_each_request_that_alone_is_right_is_what_others_hold(
    rows: tuple[int, ...], said: bool
) -> None:
    found = evidence(ROWS, wrong_rows(*rows), attended=attended(ROWS, 0))
    assert ("of each wrong request only the last row is right" in last_rows_right(found)) is said


def test_rows_that_see_other_tokens_share_no_statistics() -> None:
    out = wrong_rows(0, 1, 2)
    twice = replace(attended(ROWS, 0), doubled=frozenset({5}))
    assert hints(evidence(ROWS, out, attended=twice)) == [last_rows_right(evidence(ROWS, out, attended=twice))]
    for other in (
        None,
        attended(ROWS, 0, used=range(9)),
        replace(attended(ROWS, 0), elsewhere={"tail": 0.5}),
        replace(attended(ROWS, 0), heads=(1,)),
    ):
        assert last_rows_right(evidence(ROWS, out, attended=other)) == ""
    assert last_rows_right(evidence(ROWS, out, attended=twice, reads_foreign=True)) == ""


def test_one_row_before_the_last_says_nothing() -> None:
    two = schedule_of("draft-extend-v2-gqa2x2-d32-fp32-p4-k5.9-n2a1x2-shuffled-gauss-b3prod")
    out = right(two)
    out[:, 0] += 9.0
    assert last_rows_right(evidence(two, out, attended=attended(two, 0))) == ""
    out[:, 2] += 9.0
    assert last_rows_right(evidence(two, out, attended=attended(two, 0)))


def test_a_request_without_rows_is_neither_right_nor_wrong() -> None:
    none = schedule_of("extend-gqa2x2-d32-fp32-p4-k5.9.7-n3a3.0.3-shuffled-gauss-b3prod")
    out = right(none)
    out[:, [0, 1, 3, 4]] += 9.0
    assert last_rows_right(evidence(none, out, attended=attended(none, 0)))


WINDOW = schedule_of("decode-gqa2x2-d32-fp32-p4-k40.3.21-shuffled-gauss-w4one-b4prod")


def test_the_window_of_another_layer_is_named_where_exactly_that_is_seen() -> None:
    out = right(WINDOW)
    out[:, 0] += 9.0
    seen = attended(WINDOW, 0, used=range(36, 41), window=-1)
    found = evidence(WINDOW, out, attended=seen)
    assert "the row attended to what a window of 4 lets it see, which another layer" in window_of_another_layer(found)
    assert hints(found) == [window_of_another_layer(found)]
    for other in (
        replace(seen, used=frozenset(range(35, 41))),
        replace(seen, window=4),
        replace(seen, doubled=frozenset({36})),
        replace(seen, elsewhere={"tail": 0.5}),
        replace(seen, looked_at=frozenset(range(30, 41))),
        attended(WINDOW, 1, window=-1),
    ):
        assert window_of_another_layer(evidence(WINDOW, out, attended=other)) == ""
    assert window_of_another_layer(replace(found, in_graph=True)) == ""


# Ranges of tokens, and zeros.


def test_tokens_of_the_prefix_that_count_twice_are_no_new_ones() -> None:
    out = right(ROWS)
    out[:, 0] += 9.0
    old = replace(attended(ROWS, 0), doubled=frozenset({4, 5}))
    new = replace(attended(ROWS, 0), doubled=frozenset({5}))
    assert key_range(evidence(ROWS, out, attended=old)).startswith("KV tokens of the prefix are counted more than once")
    assert "new ones both from the pool and from k, v" in key_range(evidence(ROWS, out, attended=new))


def test_new_tokens_that_open_a_page_are_reported_by_the_page() -> None:
    out = right(ROWS)
    out[:, 0] += 9.0
    fresh = attended(ROWS, 0, used={0, 1, 2, 3, 4, 8})
    assert own_rows_mixed(evidence(ROWS, out, attended=fresh, reads_foreign=True)).startswith(
        "new tokens are read from the start of the next page on, but begin after the last one of the prefix: slot"
    )
    other = attended(ROWS, 0, used={0, 1, 2, 3, 4, 7})
    assert "mixed up with each other" in own_rows_mixed(evidence(ROWS, out, attended=other, reads_foreign=True))
    assert "mixed up with each other" in own_rows_mixed(evidence(ROWS, out, attended=fresh)), (
        "no slot of nobody is read"
    )


@pytest.mark.parametrize(
    ("schedule", "replay", "used", "said"),
    [
        (DECODE, True, {0}, True),
        (DECODE, False, {0}, False),
        (DECODE, True, {1}, False),
        (DECODE, True, {0, 1}, False),
        (ROWS, True, {0}, False),
    ],
)
def test_one_token_alone_at_a_replay_is_the_length_at_capture(
    schedule: Schedule, replay: bool, used: set[int], said: bool
) -> None:
    out = right(schedule)
    out[:, 0] += 9.0
    found = evidence(schedule, out, attended=attended(schedule, 0, used=used), replay=replay)
    assert ("as if the length were 1" in key_range(found)) is said


def test_zeros_that_earlier_steps_leave_are_no_kernel_that_is_lacking() -> None:
    zeros = torch.zeros_like(right(DECODE))
    assert "may find no kernel for this case" in nothing_computed(evidence(DECODE, zeros))
    reported = nothing_computed(evidence(DECODE, zeros, right_when_fresh=True))
    assert "is left from before" in reported
    assert "may find no kernel for this case" not in reported
