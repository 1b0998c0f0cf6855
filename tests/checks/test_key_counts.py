"""Counts of keys: half a key is the limit at any length, rounding is far from it, and what is wrong is named or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from miscounted import Run, evaluated, started, step_of, with_kv_splits, wrong_out

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import CHECKS, Comparison, evaluations
from attn_testkit.checks.counted_once import counted_once, miscounts_text
from attn_testkit.checks.key_counts import HALF_A_KEY, codes_of, in_keys, key_ratio
from attn_testkit.checks.miscounts import find_miscounts
from attn_testkit.checks.numeric import matches_oracle
from attn_testkit.contract import Capabilities
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-gqa2x2-d128-{}-p16-k4096.300.33-shuffled-plus_minus_one{}-b3prod"
BF16 = CASE.format("bf16", "")
FP8 = CASE.format("fp16", "-kvfp8e4m3")
VERIFY = "target-verify-gqa2x2-d128-bf16-p16-k1500.70-t0.0.1-shuffled-plus_minus_one-b2prod"
WINDOW = "decode-gqa2x2-d128-bf16-p16-k1500.300-shuffled-plus_minus_one-w700-b2prod"
SINKS = "decode-gqa2x2-d128-bf16-p16-k1500.300-shuffled-plus_minus_one-sink-b2prod"
MLA = "decode-mla2-d512r64-bf16-p16-k1500.300-shuffled-plus_minus_one-b2prod"
ONE_KEY = "decode-gqa2x2-d128-bf16-p16-k300.70-shuffled-plus_minus_one-w0-sink-b2prod"
SMALL = "decode-mqa2-d32-bf16-p4-k20.9-shuffled-plus_minus_one-b2prod"
N = 4097


def said(comparison: Comparison, row: int = 0) -> str:
    return miscounts_text(find_miscounts(comparison, row))


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([Run(0, 1234, 1234, -1)], "KV token 1234 was left out"),
        ([Run(0, 0, 0, -1)], "KV token 0 was left out"),
        ([Run(0, N - 1, N - 1, -1)], f"KV token {N - 1} was left out"),
        ([Run(0, 512, 527, 1)], "KV tokens 512..527 were counted twice"),
        ([Run(0, 77, 77, 2)], "KV token 77 was counted 3 times"),
        ([Run(0, 1366, 2731, -1)], "KV tokens 1366..2731 were left out"),
        ([Run(0, 2049, N - 1, -1)], f"KV tokens 2049..{N - 1} were left out"),
        ([Run(0, 9, 9, -1), Run(0, 3000, 3015, -1)], "KV tokens 9, 3000..3015 were left out"),
        ([Run(0, 9, 9, -1), Run(0, 10, 10, 1)], "KV token 9 was left out; KV token 10 was counted twice"),
        ([Run(2, 7, 7, 1)], "KV token 7 of request 2 was read"),
        ([Run(0, 500, 500, -1), Run(1, 77, 77, 1)], "KV token 77 of request 1 was read instead of KV token 500"),
        (
            [Run(0, 512, 527, -1), Run(1, 16, 31, 1)],
            "KV tokens 16..31 of request 1 were read instead of KV tokens 512..527",
        ),
        (
            [Run(0, 512, 527, -1), Run(1, 16, 31, 2)],
            "KV tokens 512..527 were left out; KV tokens 16..31 of request 1 were read",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("case", [BF16, FP8])
def test_few_runs_are_named(case: str, runs: list[Run], text: str) -> None:
    comparison = evaluated(case, runs)
    assert not comparison.right
    assert said(comparison) == text


def test_what_is_right_is_off_by_next_to_nothing() -> None:
    assert evaluated(BF16).right
    assert float(evaluated(BF16).key_ratio.max()) < 0.1
    assert counted_once(evaluated(BF16)) == []
    assert find_miscounts(evaluated(BF16), 0) is None


@pytest.mark.parametrize("case", [BF16, VERIFY, WINDOW, SINKS, MLA])
def test_a_key_that_is_left_out_is_a_whole_key_in_every_mode_and_family(case: str) -> None:
    comparison = evaluated(case, [Run(0, 1490, 1490, -1)])
    assert HALF_A_KEY * float(comparison.key_ratio[:, 0].max()) == pytest.approx(1.0, abs=0.05)
    assert said(comparison) == "KV token 1490 was left out"
    assert float(comparison.key_ratio[:, 1:].max()) < 0.2, "other rows are as they should be"


@pytest.mark.parametrize(("part", "wrong"), [(0.45, False), (0.55, True)])
def test_the_limit_is_half_a_key(part: float, wrong: bool) -> None:
    schedule, expected = started(BF16)
    out = expected.attention
    comparison = step_of(schedule, expected, out + part * (wrong_out(expected, [Run(0, 99, 99, 1)], 0) - out))
    assert bool((comparison.key_ratio[:, 0] > 1).all()) is wrong
    assert comparison.right is not wrong
    assert comparison.margin == pytest.approx(2 * part, abs=0.05)


@pytest.mark.parametrize(("dtype", "keys"), [("bf16", 64), ("bf16", 16), ("fp16", 16)])
def test_partial_results_that_are_rounded_are_far_from_the_limit(dtype: str, keys: int) -> None:
    """As many parts as channels, and twice as many: by the derivation 0.06 and 0.09 in the root of the mean square."""
    schedule, expected = started(CASE.format(dtype, ""))
    comparison = step_of(schedule, expected, with_kv_splits(expected, dtype, keys))
    assert comparison.right
    error = in_keys(comparison.out, expected)[:, 0]
    codes = [codes_of(expected.data, schedule.steps[0].lens, layer, 0).double() for layer in (0, 1)]
    # Of the heads of the first KV head.
    estimates = torch.cat([error[layer, :2] @ codes[layer].mT for layer in (0, 1)]) / 128
    splits = -(-N // keys)
    unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
    assert float(estimates.square().mean().sqrt()) < 16 * unit * (splits / 128) ** 0.5
    assert float(estimates.abs().max()) < HALF_A_KEY / 2


def test_one_key_is_named_among_partial_results_that_are_rounded() -> None:
    schedule, expected = started(BF16)
    out = with_kv_splits(expected, "bf16", 64) + wrong_out(expected, [Run(0, 2222, 2222, -1)], 0) - expected.attention
    assert said(step_of(schedule, expected, out)) == "KV token 2222 was left out"


def test_many_wrong_keys_are_not_named() -> None:
    keys = torch.randperm(4000, generator=torch.Generator().manual_seed(0))[:40].tolist()
    comparison = evaluated(BF16, [Run(0, key, key, -1) for key in keys])
    assert find_miscounts(comparison, 0) is None
    (finding,) = counted_once(comparison)
    assert finding.headline == "request 0: many KV tokens are counted a wrong number of times, or with wrong weights"


def test_wrong_weights_are_no_miscount() -> None:
    schedule, expected = started(BF16)
    ramp = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    out = expected.attention.clone()
    out[:, 0, :2] = torch.einsum("s,lsd->ld", ramp / ramp.sum(), expected.data.values[:, 0, :N, 0])[:, None]
    comparison = step_of(schedule, expected, out)
    assert not comparison.right
    assert find_miscounts(comparison, 0) is None


@pytest.mark.parametrize("weight", [0.1, 0.4])
def test_the_only_key_of_a_row_is_not_left_out_if_it_has_another_weight(weight: float) -> None:
    # Such as of a soft cap after the mask, which gives a part of the weight to keys before the window.
    schedule, expected = started(ONE_KEY)
    windowed = make_layers(schedule.case)[0]
    assert windowed.sliding_window_size == 0
    out = expected.attention.clone()
    out[0] *= weight
    comparison = step_of(schedule, expected, out)
    assert not comparison.right
    assert find_miscounts(comparison, 0) is None


def test_a_value_that_another_takes_the_place_of_is_not_called_left_out() -> None:
    schedule, expected = started(BF16)
    out, junk = expected.attention.clone(), torch.randn(128, generator=torch.Generator().manual_seed(1)).double()
    out[:, 0] -= (expected.data.values[:, 0, 99].repeat_interleave(2, 1) - 3 * junk) / N
    assert find_miscounts(step_of(schedule, expected, out), 0) is None


def test_keys_that_a_row_may_not_see_are_said_so() -> None:
    rows = evaluated(VERIFY, [Run(0, 1503, 1503, 1)], row=1)
    assert said(rows, 1) == "KV token 1503 was read, which the row may not see"
    windows = [layer.sliding_window_size for layer in make_layers(parse_case(WINDOW))]
    for key, text in ((799, "read, which the row may not see"), (800, "counted twice")):
        found = find_miscounts(evaluated(WINDOW, [Run(0, key, key, 1)], layers=[windows.index(700)]), 0)
        assert miscounts_text(found) == f"KV token {key} was {text}", "row 1500 sees 700 tokens before it"


def test_one_head_of_one_layer_is_enough() -> None:
    comparison = evaluated(BF16, [Run(0, 99, 99, -1)], layers=[1], heads=slice(2, 3))
    assert (comparison.key_ratio > 1).nonzero().tolist() == [[1, 0, 2]]
    assert said(comparison) == "KV token 99 was left out"
    assert comparison.wrong_rows == (0,)
    assert comparison.worst_row == 0
    (finding,) = counted_once(comparison)
    assert finding.headline == "request 0: KV token 99 was left out"
    assert finding.where == "out[layer 1, request 0, head 2]: the count of a KV token is off by 1.00 (limit 0.5)"
    assert finding.spread.endswith("only head 2 of 4; only layer 1")
    assert finding.step == "a step"


def test_what_every_element_shows_is_left_to_the_oracle() -> None:
    comparison = evaluated(SMALL, [Run(0, 3, 12, -1)])
    assert matches_oracle(comparison)
    assert counted_once(comparison) == []
    assert said(comparison) == "KV tokens 3..12 were left out", "for diagnosis it is named even so"


def test_rows_with_nan_are_left_to_other_checks() -> None:
    schedule, expected = started(BF16)
    out = wrong_out(expected, [Run(0, 99, 99, -1)], 0)
    out[:, 0, :, 5] = torch.nan
    comparison = step_of(schedule, expected, out)
    assert not comparison.key_ratio[:, 0].any()
    assert counted_once(comparison) == []
    assert find_miscounts(comparison, 0) is None


def test_a_head_that_nothing_computed_names_no_keys() -> None:
    schedule, expected = started(BF16)
    out = wrong_out(expected, [Run(0, 99, 99, -1)], 0)
    assert find_miscounts(step_of(schedule, expected, out), 0) is not None
    out[:, 0] = 0.0
    assert find_miscounts(step_of(schedule, expected, out), 0) is None


def test_what_rounding_may_do_to_all_weights_alike_is_no_count_and_more_of_it_is_an_error() -> None:
    schedule, expected = started(BF16)
    assert expected.key_factor is not None
    eighth = replace(expected, key_factor=torch.full_like(expected.key_factor, 1 / 8))
    lens, out = schedule.steps[0].lens, 7 / 8 * expected.attention
    assert float(key_ratio(out, eighth, lens).max()) < 1e-6
    assert float(key_ratio(out, expected, lens).max()) > 0.1
    unknown = replace(expected, key_factor=torch.full_like(expected.key_factor, torch.nan))
    assert not key_ratio(0 * out, unknown, lens).any()


def test_other_data_have_no_counts() -> None:
    schedule = make_schedule(parse_case("decode-gqa2x2-d32-fp32-p4-k3.9.6-shuffled-gauss-b4prod"))
    expected = expect(schedule, schedule.steps[0])
    assert expected.key_sum is None
    comparison = step_of(schedule, expected, expected.attention)
    assert not comparison.key_ratio.any()
    with pytest.raises(ValueError, match="plus_minus_one"):
        find_miscounts(comparison, 0)


def test_it_is_shown_by_cases_of_codes_alone_and_evaluated_behind_the_oracle() -> None:
    how = evaluations()["keys-counted-once"]
    assert how.shown_by(parse_case(BF16))
    assert not how.shown_by(parse_case(BF16.replace("plus_minus_one", "mean")))
    assert CHECKS["keys-counted-once"].behind_outputs
    assert how.run is not None
    comparison = evaluated(BF16, [Run(0, 1, 1, 1)])
    assert len(how.run(comparison, comparison.observed.schedule, Capabilities(eager={"decode"}, graph=()))) == 1
