"""Attention outputs against the oracle: a number at its limit is right, the next one above is wrong."""

from __future__ import annotations

import pytest
import torch
from by_hand import DECODE, LIMIT, comparison, expected_zeros, next_above, observation, schedule_of, zeros_like

from attn_testkit.checks import Comparison
from attn_testkit.checks.graphs import graph_matches_eager
from attn_testkit.checks.numeric import finite, matches_oracle, output_written

SHAPE = zeros_like(expected_zeros(schedule_of(DECODE))).shape
CORNERS = [(0, 0, 0, 0), tuple(size - 1 for size in SHAPE), (1, 0, 2, 17)]


def with_value(value: float, at: tuple[int, ...], **limits: float) -> Comparison:
    out = torch.zeros(SHAPE)
    out[at] = value
    return comparison(out=out, **limits)


@pytest.mark.parametrize("at", CORNERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_element_at_its_limit_is_right_and_the_next_above_is_wrong(at: tuple[int, ...], sign: int) -> None:
    met, missed = with_value(sign * LIMIT, at), with_value(sign * next_above(LIMIT), at)
    assert matches_oracle(met) == []
    assert met.right
    assert not met.wrong.any()
    assert met.margin == 1
    (finding,) = matches_oracle(missed)
    assert not missed.right
    assert finding.where.startswith(f"out[layer {at[0]}, request {at[1]}, head {at[2]}, dim {at[3]}]")
    assert missed.wrong.sum() == 1
    assert missed.wrong_rows == (at[1],) == missed.wrong_requests


def test_a_wrong_row_of_zeros_is_named_in_the_headline_and_no_other() -> None:
    schedule = schedule_of(DECODE)
    expected = expected_zeros(schedule)
    expected.attention[1, 2] = 1.0
    out = torch.zeros(SHAPE)
    (finding,) = matches_oracle(Comparison(observation(schedule, expected, out), expected))
    assert finding.headline.startswith("request 2 differs from the oracle, ")
    assert finding.headline.endswith(" over the limit: a row of its output is all zeros")
    out[1, 2, -1, -1] = 0.5
    (finding,) = matches_oracle(Comparison(observation(schedule, expected, out), expected))
    assert finding.headline.endswith(" over the limit"), "one number of the row was computed"


def test_a_row_at_its_norms_limit_is_right_and_the_next_above_is_wrong() -> None:
    out = torch.zeros(SHAPE)
    out[1, 2, 3, :2] = torch.tensor([0.1875, 0.25])  # 3, 4 and 5 sixteenths
    met = comparison(out=out, row_limit=0.3125)
    assert matches_oracle(met) == []
    assert not met.wrong.any()
    assert met.margin == 1
    out[1, 2, 3, 1] = next_above(0.25)
    missed = comparison(out=out, row_limit=0.3125)
    assert missed.margin > 1
    (finding,) = matches_oracle(missed)
    assert finding.where.startswith("out[layer 1, request 2, head 3, dim 1]"), "the largest element of the row"
    assert missed.wrong[1, 2, 3].all(), "a row that is wrong as a whole is wrong in each element"
    assert missed.wrong.sum() == SHAPE[-1]


def test_the_margin_is_the_largest_of_elements_and_rows_and_nan_is_infinite() -> None:
    assert with_value(LIMIT / 4, (1, 1, 1, 1)).margin == 0.25
    assert with_value(LIMIT / 4, (1, 1, 1, 1), row_limit=LIMIT / 2).margin == 0.5
    assert with_value(torch.nan, (1, 1, 1, 1)).margin == torch.inf
    assert comparison().margin == 0


def test_the_worst_element_is_the_one_furthest_over_its_own_limit() -> None:
    out = torch.zeros(SHAPE)
    out[0, 0, 0, 0], out[1, 2, 1, 5] = 3 * LIMIT, 2 * LIMIT
    found = comparison(out=out)
    found.expected.attention_limit[0, 0, 0, 0] = 2 * LIMIT
    assert found.worst == (1, 2, 1, 5, 2.0)
    assert found.worst_row == 2


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_is_named_where_the_other_one_is_right(layer: int) -> None:
    out = torch.zeros(SHAPE)
    out[layer, 0, 0, 0] = 2 * LIMIT
    assert matches_oracle(comparison(out=out))[0].spread.endswith(f"; only layer {layer}")
    out[1 - layer, 2, 1, 5] = 2 * LIMIT
    assert "layer" not in matches_oracle(comparison(out=out))[0].spread


@pytest.mark.parametrize("at", CORNERS)
def test_one_element_that_was_not_written_is_enough(at: tuple[int, ...]) -> None:
    out = torch.zeros(SHAPE)
    out.view(torch.int32)[at] = -1
    found = comparison(out=out)
    (finding,) = output_written(found)
    assert f"layer {at[0]}, request {at[1]}, head {at[2]}, dim {at[3]}" in finding.where
    assert finite(found) == [], "what was never written is not called NaN"
    assert found.worst_row == at[1]
    assert not found.right


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_poison_is_all_bits_set_and_another_nan_is_computed(dtype: torch.dtype) -> None:
    out = torch.zeros(SHAPE, dtype=dtype)
    out[0, 1, 0, 3] = torch.nan
    computed = comparison(out=out)
    assert output_written(computed) == []
    assert "request 1 has nan" in finite(computed)[0].headline
    poisoned = out.clone()
    poisoned[0, 1, 0, 3].view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).fill_(-1)
    assert len(output_written(comparison(out=poisoned))) == 1


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_reported_as_that_and_numbers_beside_it_as_wrong(value: float) -> None:
    out = torch.zeros(SHAPE)
    out[1, 0, 1, 2] = value
    found = comparison(out=out)
    assert len(finite(found)) == 1
    assert matches_oracle(found) == []
    out[0, 2, 0, 0] = 2 * LIMIT
    assert "request 2" in matches_oracle(comparison(out=out))[0].headline


def test_a_replay_may_differ_from_eager_by_two_limits_and_by_no_more() -> None:
    schedule = schedule_of(DECODE)
    expected, at = expected_zeros(schedule), (1, 2, 3, 31)
    for replayed, found in ((LIMIT, 0), (next_above(LIMIT), 1)):
        out, eager = torch.zeros(SHAPE), torch.zeros(SHAPE)
        out[at], eager[at] = replayed, -LIMIT
        run = observation(schedule, expected, eager)
        findings = graph_matches_eager(Comparison(observation(schedule, expected, out, eager_run=run), expected))
        assert len(findings) == found
        assert all("layer 1, request 2, head 3, dim 31" in finding.where for finding in findings)


def test_other_bits_than_in_eager_count_where_they_are_declared() -> None:
    schedule = schedule_of(DECODE)
    expected, out = expected_zeros(schedule), torch.zeros(SHAPE)
    out[1, 2, 0, 0] = -0.0
    seen = observation(schedule, expected, out, eager_run=observation(schedule, expected))
    found = Comparison(seen, expected)
    assert graph_matches_eager(found) == []
    assert "request 2 gives different bits" in graph_matches_eager(found, same_bits=True)[0].headline
    alike = observation(schedule, expected, eager_run=observation(schedule, expected))
    assert graph_matches_eager(Comparison(alike, expected), same_bits=True) == []
    assert graph_matches_eager(comparison(), same_bits=True) == [], "no eager run, nothing to compare with"


def test_the_same_bits_as_in_eager_are_those_of_one_dtype_and_prove_nothing_where_they_are_wrong() -> None:
    schedule = schedule_of(DECODE)
    expected, out = expected_zeros(schedule), torch.zeros(SHAPE)

    def beside(eager: torch.Tensor) -> Comparison:
        return Comparison(
            observation(schedule, expected, out, eager_run=observation(schedule, expected, eager)), expected
        )

    assert beside(out).as_in_eager
    assert not beside(out.double()).as_in_eager
    assert not beside(-out).as_in_eager, "-0 has other bits"
    assert not comparison().as_in_eager, "there is no eager run"
    out[0, 0, 0, 0] = torch.nan
    assert graph_matches_eager(beside(out)), "NaN in both is no agreement"


def test_judging_leaves_the_outputs_as_they_were() -> None:
    found = comparison(out=torch.zeros(SHAPE, dtype=torch.float64) + LIMIT)
    assert found.margin == 1
    assert (found.out == LIMIT).all()
