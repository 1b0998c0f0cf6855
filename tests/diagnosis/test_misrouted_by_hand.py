"""Whose result it is: a row within every limit of another, the same bits as it, or its query with other KV tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch
from wrong_steps import observed, v1

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.observation import Observation
from attn_testkit.diagnosis.misrouted_rows import _like, find_misrouted
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.attention import attend
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.schedule import Schedule, make_schedule


def with_rows(schedule: Schedule, change: Callable[[torch.Tensor, Any], None]) -> Comparison:
    expected = expect(schedule, schedule.steps[0])
    out = expected.attention.float().clone()
    change(out, expected)
    return Comparison(observed(schedule, out), expected)


def swaps(comparison: Comparison, rerunner: Any = None) -> list[str]:
    schedule = comparison.observed.schedule
    return [row.text for row in find_misrouted(rerunner, schedule, comparison, in_graph=False)]


def test_rows_that_hold_each_others_results_are_named() -> None:
    def swap(out: torch.Tensor, expected: Any) -> None:
        out[:, [0, 3]] = out[:, [3, 0]]

    assert swaps(with_rows(v1(), swap)) == [
        "request 0 holds the result of request 1 row 1",
        "request 1 row 1 holds the result of request 0",
    ]


def test_one_layer_that_is_swapped_is_enough_and_zeros_are_nobodys() -> None:
    def one_layer(out: torch.Tensor, expected: Any) -> None:
        out[1, 0] = out[1, 1]

    def zeros(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] = 0.0

    def noise(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] += 3.0

    assert swaps(with_rows(v1(), one_layer)) == ["request 0 holds the result of request 0 row 1"]
    assert swaps(with_rows(v1(), zeros)) == swaps(with_rows(v1(), noise)) == []


def test_a_row_that_sees_one_kv_token_is_no_place_of_another_rows_result() -> None:
    """Of one KV token every query makes the same: what row 1 lacks may be a row of the mask."""
    tree = "target-verify-gqa2x2-d32-fp32-p4-k{}.9-t0.0.0-shuffled-gauss-b2prod"

    def of_row_0(out: torch.Tensor, expected: Any) -> None:
        out[:, 1] = out[:, 0]

    def of_request_0(out: torch.Tensor, expected: Any) -> None:
        out[:, 4] = out[:, 0]

    one, two = (make_schedule(parse_case(tree.format(prefix))) for prefix in (0, 1))
    assert swaps(with_rows(one, of_row_0)) == []
    assert swaps(with_rows(two, of_row_0)) == ["request 0 row 1 holds the result of request 0 row 0"]
    assert swaps(with_rows(one, of_request_0)) == ["request 1 holds the result of request 0"]


def test_a_copy_of_a_wrong_row_of_another_request_is_seen_and_of_its_own_is_not() -> None:
    def copied(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] += 3.0
        out[:, 5] = out[:, 0]

    def its_own(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] += 3.0
        out[:, 1] = out[:, 0]

    assert swaps(with_rows(v1(), copied)) == [
        "request 0 holds the same values as request 2",
        "request 2 holds the same values as request 0",
    ]
    assert swaps(with_rows(v1(), its_own)) == []


def computed_with(schedule: Schedule, other: int, keys: int) -> list[str]:
    """What is said where row 0 of request 0 saw the first KV tokens of another request."""
    data = make_step_data(schedule, schedule.steps[0])

    def foreign(out: torch.Tensor, expected: Any) -> None:
        visible, positions = torch.zeros_like(data.visible), torch.zeros_like(data.query_positions)
        visible[other, 0] = torch.arange(visible.shape[2]) < keys
        positions[other, 0] = keys - 1
        supposed = replace(
            data, q=data.q[:, :1], row_request=torch.tensor([other]), row_offset=torch.tensor([0]), visible=visible,
            key_positions=torch.arange(visible.shape[2]).expand(len(visible), -1), query_positions=positions,
        )  # fmt: skip
        out[:, 0] = attend(supposed, make_layers(schedule.case)).out[:, 0].float()

    return swaps(with_rows(schedule, foreign))


@pytest.mark.parametrize("words", ["", "-w4"])
@pytest.mark.parametrize(("other", "keys"), [(1, 12), (1, 11), (1, 9), (2, 17), (2, 14), (1, 7), (1, 6)])
def test_a_row_that_was_computed_with_tokens_of_another_request(other: int, keys: int, words: str) -> None:
    schedule = v1("gauss" + words)
    assert schedule.steps[0].lens == [7, 12, 17]
    assert computed_with(schedule, other, keys) == [
        f"request 0 was computed with KV tokens 0..{keys - 1} of request {other}"
    ]


def test_tokens_of_another_requests_tree_are_counted_one_after_the_other() -> None:
    words = "target-verify-gqa2x2-d32-fp32-p4-k5.9-t0.0.1-shuffled-gauss-w4-b2prod"
    schedule = make_schedule(parse_case(words))
    assert schedule.steps[0].lens == [9, 13]
    assert computed_with(schedule, 1, 13) == ["request 0 was computed with KV tokens 0..12 of request 1"]


def test_a_wrong_length_in_a_prefix_that_requests_share_is_no_swap() -> None:
    words = "draft-extend-gqa2x2-d32-fp32-p4-k22x2-n3a1x2-shared-gauss-b2prod"
    schedule = make_schedule(parse_case(words))
    assert [request.shared for request in schedule.steps[0].requests] == [20, 20]
    assert computed_with(schedule, 1, 20) == computed_with(schedule, 0, 20) == []


def test_keys_of_an_fp8_pool_are_compared_too() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-bf16-p4-k23.16.20-shuffled-gauss-kvfp8e4m3-b3prod"))
    assert computed_with(schedule, 1, 17) == ["request 0 was computed with KV tokens 0..16 of request 1"]


def test_a_shared_prefix_is_ones_own_though_it_is_no_length_of_ones_own() -> None:
    """Request 0 saw the 16 KV tokens that it shares with request 1; with the one behind them it is a swap."""
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k23.16.20-shared-gauss-b3prod"))
    step = schedule.steps[0]
    assert (step.lens[:2], [request.shared for request in step.requests][:2]) == ([24, 17], [20, 16])
    assert computed_with(schedule, 1, 16) == []
    assert computed_with(schedule, 1, 17) == ["request 0 was computed with KV tokens 0..16 of request 1"]


@pytest.mark.parametrize(("other", "keys"), [(1, 8), (2, 13), (1, 13)])
def test_lengths_that_no_row_of_either_request_would_have_are_not_looked_for(other: int, keys: int) -> None:
    """Three rows see at most three tokens fewer than the request has, and none more than it has."""
    assert computed_with(v1(), other, keys) == []


def test_the_first_token_of_another_request_alone_is_looked_for() -> None:
    schedule = make_schedule(parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.1.14-n3a2.1.3-shuffled-gauss-b3prod"))
    assert schedule.steps[0].lens == [7, 2, 17]
    assert computed_with(schedule, 1, 1) == ["request 0 was computed with KV tokens 0..0 of request 1"]


@pytest.mark.parametrize("wrong", [(0,), (0, 1)])
def test_the_only_own_token_that_a_row_saw_is_no_other_requests_where_their_data_are_alike(wrong: tuple[int]) -> None:
    """In ``one_hot`` data key 0 of every long request is carried by the same channel."""
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k63.70.0-shuffled-one_hot-b3prod"))
    data = make_step_data(schedule, schedule.steps[0])
    assert data.stored_values is not None
    assert torch.equal(data.stored_values[:, 0, 0], data.stored_values[:, 1, 0])

    def first_token(out: torch.Tensor, expected: Any) -> None:
        for row in wrong:
            out[:, row] = data.stored_values[:, row, 0].repeat_interleave(2, 1)

    comparison = with_rows(schedule, first_token)
    assert comparison.wrong_rows == wrong
    assert swaps(comparison) == []


def test_a_swapped_row_may_be_right_in_some_of_its_values() -> None:
    schedule = v1()
    expected = expect(schedule, schedule.steps[0])
    right = expected.attention.clone()
    right[:, 3, 0, 0] = right[:, 0, 0, 0]
    out = right.float().clone()
    out[:, [0, 3]] = out[:, [3, 0]]
    comparison = Comparison(observed(schedule, out), replace(expected, attention=right))
    assert not comparison.wrong[:, 0, 0, 0].any()
    assert swaps(comparison) == [
        "request 0 holds the result of request 1 row 1",
        "request 1 row 1 holds the result of request 0",
    ]


def test_of_many_wrong_rows_the_first_dozen_is_compared() -> None:
    lens = ".".join(str(n) for n in range(5, 19))
    schedule = make_schedule(parse_case(f"decode-gqa2x2-d32-fp32-p4-k{lens}-shuffled-gauss-b14prod"))

    def turn(out: torch.Tensor, expected: Any) -> None:
        out[:] = out.roll(1, 1)

    found = swaps(with_rows(schedule, turn))
    assert found == [f"request {i} holds the result of request {(i - 1) % 14}" for i in range(12)]


def test_where_all_queries_are_alike_other_numbers_are_asked_for() -> None:
    schedule = v1("mean")
    other = expect(schedule, schedule.steps[0], "gauss")
    out = other.attention.float().clone()
    out[:, [0, 3]] = out[:, [3, 0]]
    asked: list[Any] = []

    class Asked:
        def eager(self, schedule: Schedule, step: Any, *, pattern: str) -> Observation:
            asked.append(("eager", pattern))
            return observed(schedule, out)

        def graph(self, schedule: Schedule, *, pattern: str) -> Any:
            asked.append(("graph", pattern))
            return Of(replay_of=lambda step: observed(schedule, out) if step is schedule.steps[0] else None)

    def off(out: torch.Tensor, expected: Any) -> None:
        out += 3.0

    comparison = with_rows(schedule, off)
    assert swaps(comparison) == []
    for how in ("eager", "graph"):
        assert len(find_misrouted(Asked(), schedule, comparison, in_graph=how == "graph")) == 2  # type: ignore[arg-type]
        assert asked.pop() == (how, "gauss")
    silent = Of(graph=lambda *_, **__: None, eager=lambda *_, **__: None)
    for in_graph in (False, True):
        assert find_misrouted(silent, schedule, comparison, in_graph=in_graph) == ()  # type: ignore[arg-type]


# When a row is another one.

LIMIT = 0.5
SHAPE = (2, 3, 2, 4)
"""Layers, rows, heads, values."""


def rows() -> torch.Tensor:
    """Each head of each layer has one value beyond its limit, another one in each, and row 1 is the largest."""
    right = torch.zeros(SHAPE, dtype=torch.float64)
    for layer in (0, 1):
        for head in (0, 1):
            right[layer, :, head, 2 * layer + head] = torch.tensor([0.75, 4.0, -0.75], dtype=torch.float64)
    return right


def like(out: torch.Tensor, right: torch.Tensor) -> list[bool]:
    there = torch.ones_like(right[:, :1], dtype=torch.bool)
    found: list[bool] = _like(out, right, torch.full(SHAPE, LIMIT, dtype=torch.float64), there).tolist()
    return found


def test_a_row_at_its_limits_is_the_other_and_one_value_beyond_is_enough_to_be_none() -> None:
    right = rows()
    assert like(right[:, 1], right) == [False, True, False]
    assert like(right[:, 1] + LIMIT, right) == [False, True, False]
    for at in ((0, 0, 0), (1, 1, 3)):
        out = right[:, 1] - LIMIT
        out[at] -= 1e-9
        assert like(out, right) == [False] * 3


@pytest.mark.parametrize("at", [(0, 0), (1, 1)])
def test_a_row_with_a_head_that_is_within_its_limits_of_zero_is_nobodys(at: tuple[int, int]) -> None:
    right = rows()
    right[at[0], 1, at[1]] = LIMIT
    assert like(right[:, 1], right) == [False] * 3
    assert like(right[:, 0], right)[0]


def copied(values: torch.Tensor) -> list[str]:
    """What is said where row 0 and a row of request 2 hold ``values`` [L, Hq, Dv], which are nobody's."""

    def change(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] = out[:, 5] = values

    return swaps(with_rows(v1(), change))


COPIES = ["request 0 holds the same values as request 2", "request 2 holds the same values as request 0"]


def nobodys() -> Any:
    return torch.arange(1.0, 257.0).view(2, 4, 32)


def test_the_same_bits_are_a_copy_though_a_head_or_a_value_of_each_is_zero() -> None:
    assert copied(nobodys()) == COPIES
    assert copied(nobodys() / 1e6) == COPIES, "small numbers are numbers"
    head, value = nobodys(), nobodys()
    head[:, 1] = 0.0
    value[:, :, 7] = 0.0
    assert copied(head) == copied(value) == COPIES


def test_nothing_is_no_copy_of_nothing() -> None:
    layer = nobodys()
    layer[0] = 0.0
    assert copied(layer) == copied(torch.zeros(2, 4, 32)) == []


def test_infinity_is_no_copy_of_infinity() -> None:
    one = nobodys()
    one[0, 0, 0] = torch.inf
    assert copied(one) == copied(torch.full((2, 4, 32), torch.inf)) == []


def test_one_value_that_is_the_same_is_no_copy() -> None:
    def change(out: torch.Tensor, expected: Any) -> None:
        out[:, 0] = nobodys()
        out[:, 5] = -nobodys()
        out[:, 5, 0, 0] = out[:, 0, 0, 0]

    assert swaps(with_rows(v1(), change)) == []


def test_a_row_that_is_wrong_as_a_whole_alone_is_not_called_its_own() -> None:
    def change(out: torch.Tensor, expected: Any) -> None:
        out[:, 0, 0, 0] += 1e-7

    comparison = with_rows(v1(), change)
    assert comparison.right
    tight = replace(comparison.expected, row_limit=torch.full_like(comparison.expected.row_limit, 1e-9))
    comparison = Comparison(comparison.observed, tight)
    assert comparison.wrong_rows[0] == 0
    assert swaps(comparison) == []


def with_queries_of(schedule: Schedule, of: Callable[[int], int]) -> Comparison:
    """Every row sees its own KV tokens, with the query of another."""
    expected = expect(schedule, schedule.steps[0])
    rows = torch.tensor([of(row) for row in range(expected.data.q.shape[1])])
    out = attend(replace(expected.data, q=expected.data.q[:, rows]), make_layers(schedule.case)).out
    return Comparison(observed(schedule, out.float()), expected)


def test_a_row_with_the_query_of_another_is_named() -> None:
    schedule = v1()
    last = len(expect(schedule, schedule.steps[0]).data.row_request) - 1
    first, *_ = swaps(with_queries_of(schedule, lambda row: 2 if row == last else row))
    assert first.endswith("was computed with the query of request 1")


def test_with_one_kv_token_to_see_every_query_is_right() -> None:
    schedule = make_schedule(parse_case("draft-extend-mha2-d32-fp32-p4-k0.5-n2a2x2-shuffled-gauss-b2prod"))
    comparison = with_queries_of(schedule, lambda row: 1 if row == 0 else row)
    assert comparison.expected.data.visible[0, 0].sum() == 1
    off = comparison.expected.attention.float().clone()
    off[:, 0] += 1e-7
    tight = replace(comparison.expected, row_limit=torch.full_like(comparison.expected.row_limit, 1e-9))
    comparison = Comparison(observed(schedule, off), tight)
    assert comparison.wrong_rows[0] == 0
    assert not any("with the query of" in text for text in swaps(comparison))
