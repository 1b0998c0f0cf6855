"""Dims, windows and parts of a prefix that are left out or another's: each is named, and not where nothing tells it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_other_places_by_hand import attended, evidence, right, schedule_of, with_data
from wrong_steps import assumed

from attn_testkit.diagnosis.hints import hints
from attn_testkit.diagnosis.hints.assumed_keys import rows_counted_by_heads, window_on_new_rows_alone
from attn_testkit.diagnosis.hints.batch import length_threshold
from attn_testkit.diagnosis.hints.columns import columns_moved
from attn_testkit.diagnosis.hints.heads import some_dims, some_heads
from attn_testkit.diagnosis.hints.keys import key_range, window_of_another_layer
from attn_testkit.diagnosis.hints.rows import rows_of_others
from attn_testkit.diagnosis.misrouted_rows import MisroutedRow
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import Schedule

WINDOW = schedule_of("extend-gqa2x2-d32-fp32-p4-k20.9.5-n12a12.2.3-shuffled-gauss-w4-b3prod")
SHORT = schedule_of("extend-gqa2x2-d32-fp32-p4-k20.9.5-n3a3.2.3-shuffled-gauss-w4-b3prod")
PLAIN = schedule_of("extend-gqa2x2-d32-fp32-p4-k20.9.5-n12a12.2.3-shuffled-gauss-b3prod")
DECODE = schedule_of("decode-gqa2x2-d64-fp32-p4-k40.9.21-shuffled-gauss-b4prod")
MLA = schedule_of("decode-mla16-d512r64-bf16-p64-k7x2-reversed-gauss-b2prod")


# Windows.


def sees(schedule: Schedule, whose: str) -> torch.Tensor:
    """What a backend gives that lets windows see all ``of the prefix``, or everything."""
    data = expect(schedule, schedule.steps[0]).data
    prefixes = torch.tensor([request.prefix for request in schedule.steps[0].requests])[:, None]
    free = torch.arange(data.key_positions.shape[1]) < (prefixes if whose == "the prefix" else 1 << 20)
    return with_data(schedule, key_positions=data.key_positions.masked_fill(free, 1 << 20)).nan_to_num(0.0)


def told_of_windows(schedule: Schedule, out: torch.Tensor, **more: Any) -> str:
    return window_on_new_rows_alone(
        evidence(schedule, out, **{"attended": attended(schedule, 0, used=range(21), wanted=range(16, 21)), **more})
    )


def test_a_window_that_narrows_new_tokens_alone_is_named() -> None:
    out = sees(WINDOW, "the prefix")
    assert told_of_windows(WINDOW, out).startswith(
        "the call or loop over the prefix lacks the window: the result is right if the window narrows"
    )
    assert told_of_windows(WINDOW, out, attended=None) == ""
    assert told_of_windows(WINDOW, out, attended=attended(WINDOW, 0)) == "", "the row that was asked is right"
    assert told_of_windows(WINDOW, out, in_graph=True) == ""
    out[:, 3] = right(WINDOW)[:, 3]
    assert told_of_windows(WINDOW, out) == "", "a row that is right is not right for that"


def test_no_window_at_all_is_not_reported_as_one_of_new_tokens() -> None:
    assert told_of_windows(WINDOW, sees(WINDOW, "everything")) == ""
    # Of three new tokens all lie within the window: nothing tells the two apart.
    assert torch.equal(sees(SHORT, "the prefix"), sees(SHORT, "everything"))
    assert told_of_windows(SHORT, sees(SHORT, "the prefix")) == ""
    assert told_of_windows(PLAIN, right(PLAIN) + 9.0) == "", "there is no window"


@pytest.mark.parametrize(
    ("rows", "wider", "in_graph", "text"),
    [
        (
            8,
            99,
            False,
            "KV tokens before the window are visible, all of them: probably sliding_window_size does not reach",
        ),
        (8, 1, False, "one KV token before the window is visible: probably a window that is one too wide"),
        (5, 99, False, "one KV token before the window is visible"),  # nothing tells the two apart
        (8, 99, True, "one KV token before the window is visible"),  # and nobody can be asked
    ],
)
def test_one_token_before_the_window_is_no_window_at_all_where_other_rows_say_so(
    rows: int, wider: int, in_graph: bool, text: str
) -> None:
    schedule = schedule_of(f"extend-gqa2x2-d32-fp32-p4-k1-n{rows}a{rows}-shuffled-gauss-w4-b1prod")
    out = with_data(schedule, query_positions=expect(schedule, schedule.steps[0]).data.query_positions - wider)
    asked = attended(schedule, 0, row=4, used=range(6), wanted=range(1, 6), window=4)
    assert key_range(evidence(schedule, out, attended=asked, in_graph=in_graph)).startswith(text)


def test_what_another_layers_window_shares_with_none_at_all_is_reported_as_both() -> None:
    schedule = schedule_of("decode-gqa2x2-d32-fp32-p4-k40.3.21-shuffled-gauss-w4one-b4prod")
    out = right(schedule)
    out[:, 1] += 9.0

    def reported(window: int, used: range) -> str:
        mine = attended(schedule, 1, used=used, wanted=range(1, 4), window=window)
        return window_of_another_layer(evidence(schedule, out, attended=mine))

    # The other layer's window of 4 sees all four KV tokens of request 1.
    assert "the row attended to what it sees without a window, or with one of 4, which another" in reported(2, range(4))
    assert reported(2, range(2, 4)) == ""


@pytest.mark.parametrize(
    ("extra", "in_graph", "ends"),
    [
        (range(29), False, "does not reach the kernel, perhaps only for the KV tokens of the prefix"),
        (
            range(29),
            True,
            "does not reach the kernel where the graph is captured, perhaps only for the KV tokens of the prefix",
        ),
        (range(1, 29), False, "KV tokens before the window are visible"),
        (range(28), False, "KV tokens before the window are visible"),
    ],
)
def test_all_tokens_before_a_window_are_no_window(extra: range, in_graph: bool, ends: str) -> None:
    schedule = schedule_of("decode-gqa2x2-d32-fp32-p16-k40.9-shuffled-gauss-w11-b2prod")
    mine = attended(schedule, 0, used={*extra, *range(29, 41)}, wanted=range(29, 41), window=11)
    found = evidence(schedule, right(schedule), attended=mine, in_graph=in_graph)
    assert key_range(found).startswith("KV tokens before the window are visible")
    assert key_range(found).endswith(ends)


def test_longer_requests_that_read_more_than_they_should_are_no_matter_of_length() -> None:
    out = right(DECODE)
    out[:, 0] += 9.0
    more = attended(DECODE, 0, used=range(41), wanted=range(30, 41))
    less = attended(DECODE, 0, used=range(30), wanted=range(41))
    other = attended(DECODE, 0, used={*range(30), 40}, wanted=range(5, 35))
    assert length_threshold(evidence(DECODE, out, attended=more, in_graph=True)) == ""
    for mine in (less, other):
        assert "requests of up to 22" in length_threshold(evidence(DECODE, out, attended=mine, in_graph=True))


# Rows and parts.


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(4, 1), (8, 2)], "row 4n holds what row n should"),
        ([(4, 1), (8, 2), (13, 3)], ""),
        ([(4, 1)], ""),
        ([(3, 2), (6, 4)], ""),
        ([(1, 1), (2, 2)], ""),
        ([(1, 4), (2, 8)], ""),
        ([(4, 0), (8, 0)], ""),
    ],
)
def test_rows_at_a_multiple_of_their_number_are_written_by_other_strides(
    rows: list[tuple[int, int]], said: str
) -> None:
    # Flat rows 0..11 are request 0's, 12 and 13 request 1's.
    def place(row: int) -> tuple[int, int]:
        return (0, row) if row < 12 else (1, row - 12)

    misrouted = tuple(MisroutedRow(*place(row), *place(of_row)) for row, of_row in rows)
    text = rows_of_others(evidence(PLAIN, right(PLAIN) + 9.0, misrouted=misrouted))
    assert bool(said) is ("written by the strides of another tensor" in text)
    assert said in text


def test_heads_that_lack_the_whole_prefix_lack_it_in_a_merge() -> None:
    def reported(used: Any, row: int = 0) -> str:
        mine = replace(attended(PLAIN, 0, row, used=used), heads=(1,), head=1)
        return some_heads(evidence(PLAIN, right(PLAIN) + 9.0, attended=mine))

    merge = "their part of the prefix is lost in the merge with the new tokens"
    assert merge in reported(range(20, 24), row=3), "the new tokens alone"
    assert merge in reported(range(20), row=3), "the prefix alone"
    assert merge not in reported(range(21), row=3)
    assert merge not in reported(range(19), row=3)
    assert merge not in reported((), row=3)
    assert merge not in reported({*range(20, 24), 30}, row=3), "a later token too"


CHAIN = schedule_of("target-verify-gqa3x2-d32-fp32-p4-k9.0.5-chain7-shuffled-gauss-b3prod")
MEAN = schedule_of("target-verify-gqa3x2-d32-fp32-p4-k9.0.5-chain7-shuffled-mean-b3prod")
FOUR, THREE = (schedule_of(f"target-verify-gqa3x2-d32-fp32-p4-k9.0.5-chain{n}-shuffled-gauss-b3prod") for n in (4, 3))
NO_GROUP = schedule_of("target-verify-mha2-d32-fp32-p4-k9.0.5-chain7-shuffled-gauss-b3prod")
TREE = schedule_of("target-verify-gqa3x2-d32-fp32-p4-k9.0.5-t0.0.1.1.3.2-shuffled-gauss-b3prod")


def of_row(schedule: Schedule, by: int) -> torch.Tensor:
    """What a backend gives whose row i sees what row i // by should."""
    data = expect(schedule, schedule.steps[0]).data
    row = torch.arange(data.visible.shape[1]) // by
    return with_data(schedule, visible=data.visible[:, row], query_positions=data.query_positions[:, row])


@pytest.mark.parametrize(
    ("schedule", "by", "said"),
    [
        (CHAIN, 3, True),
        (MEAN, 3, True),
        (CHAIN, 2, False),
        (CHAIN, 4, False),
        (FOUR, 3, True),
        (THREE, 3, False),
        (NO_GROUP, 3, False),
        (TREE, 3, False),
    ],
)
def test_rows_whose_keys_end_by_packed_rows_are_named(schedule: Schedule, by: int, said: bool) -> None:
    out = of_row(schedule, by).nan_to_num(0.0)
    found = evidence(schedule, out, attended=attended(schedule, 0, 1, used=range(10), wanted=range(11)))
    assert rows_counted_by_heads(found).endswith("right if row i sees what row i // 3 should") is said
    assert rows_counted_by_heads(replace(found, attended=None)) == ""
    assert rows_counted_by_heads(replace(found, in_graph=True)) == ""
    if said:
        assert hints(found)[0] == rows_counted_by_heads(found)
        out[:, 2] += 9.0
        assert rows_counted_by_heads(evidence(schedule, out, attended=found.attended)) == "", "something else is wrong"


# Dims.


def without_dims(schedule: Schedule, first: int, end: int) -> torch.Tensor:
    q = expect(schedule, schedule.steps[0]).data.q.clone()
    q[..., first:end] = 0
    return with_data(schedule, q=q)


@pytest.mark.parametrize(
    ("schedule", "first", "end", "text"),
    [
        (DECODE, 48, 64, "right if dims 48..63 of 64 are left out of the product of q and k"),
        (DECODE, 16, 64, "right if dims 16..63 of 64"),
        (DECODE, 16, 32, "right if dims 16..31 of 64"),
        (DECODE, 0, 16, "right if dims 0..15 of 64"),
        (DECODE, 8, 24, ""),
        (MLA, 448, 512, "right if dims 448..511 of 576"),
        (MLA, 512, 576, "right if dims 512..575 of 576"),
    ],
)
def test_dims_that_are_left_out_of_logits_are_named(schedule: Schedule, first: int, end: int, text: str) -> None:
    reported = assumed(evidence(schedule, without_dims(schedule, first, end), attended=attended(schedule, 0)))
    assert text in reported
    assert bool(reported) is bool(text)


def test_a_run_of_wrong_dims_is_a_tile_and_what_it_holds_is_named() -> None:
    out = right(DECODE)
    out[..., 16:32] = out[..., 32:48]
    found = evidence(DECODE, out)
    assert some_dims(found).startswith("only dims 16..31 of 64 are wrong, and hold what dims 32..47 should: a tile of")
    assert hints(found) == [columns_moved(found)], "every column is accounted for"
    out[..., 16:32] += 9.0
    assert some_dims(evidence(DECODE, out)).startswith(
        "only dims 16..31 of 64 are wrong: probably a tile of the head dim, when V"
    )


@pytest.mark.parametrize(
    ("first", "end", "said"),
    [(0, 16, True), (0, 8, False), (0, 11, True), (0, 10, False), (8, 24, False), (0, 48, True), (0, 64, False)],
)
def test_wrong_dims_are_a_tile_where_they_fill_most_of_one(first: int, end: int, said: bool) -> None:
    out = right(DECODE)
    out[..., first:end] += 9.0
    assert bool(some_dims(evidence(DECODE, out))) is said
