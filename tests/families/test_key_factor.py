"""By how much rounding may change all weights alike, where every logit is 0; and where keys cannot be counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.families.softmax.attention import Attention
from attn_testkit.families.softmax.limits import key_factor
from attn_testkit.steps.data import make_step_data
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-gqa2x2-d32-{}-p4-k40.9-shuffled-plus_minus_one{}-b2prod"


def attention_of(words: str, dtype: str = "fp16") -> Attention:
    schedule = make_schedule(parse_case(CASE.format(dtype, words)))
    return attend_with_limit(schedule, make_step_data(schedule, schedule.steps[0]))[0]


@pytest.mark.parametrize(("dtype", "unit"), [("bf16", 2.0**-8), ("fp32", 2.0**-24)])
def test_without_a_sink_it_is_the_rounding_of_a_weight(dtype: str, unit: float) -> None:
    assert torch.all(key_factor(attention_of("", dtype), dtype) == unit)


def test_fp16_and_fp8_have_smallest_numbers_that_a_weight_of_one_is_far_from() -> None:
    attention = attention_of("")
    assert torch.all(key_factor(attention, "fp16") == 2.0**-11 + 2.0**-25)
    assert torch.all(key_factor(attention, "fp16", "fp8_e4m3") == 2.0**-4 + 2.0**-12)
    assert torch.all(key_factor(attention, "fp16", "fp8_e4m3_unscaled") == 2.0**-4 + 2.0**-10)


@pytest.mark.parametrize(
    ("products", "absolute"), [("model", 2.0**-25), ("fp8_e4m3", 2.0**-12), ("fp8_e4m3_unscaled", 2.0**-10)]
)
def test_keys_beside_a_sink_are_counted_up_to_where_rounding_may_take_a_sixteenth_of_each(
    products: str, absolute: float
) -> None:
    attention, edge = attention_of("-sink"), math.log(2.0**-4 / absolute)
    for above, counted in ((-1e-9, True), (1e-9, False)):
        found = key_factor(replace(attention, top=torch.full_like(attention.top, edge + above)), "fp16", products)
        assert bool(found.isfinite().all()) is counted
        assert bool(found.isnan().all()) is not counted


def test_bfloat16_has_no_smallest_number_that_matters() -> None:
    attention = attention_of("-sink", "bf16")
    assert torch.all(key_factor(replace(attention, top=attention.top + 50), "bf16") == 2.0**-8)


def test_the_sum_of_weights_is_that_of_the_keys_and_of_the_sink() -> None:
    for words in ("", "-sink"):
        schedule = make_schedule(parse_case(CASE.format("bf16", words)))
        expected = expect(schedule, schedule.steps[0])
        assert expected.key_sum is not None
        assert expected.key_sum.shape == expected.attention.shape[:3]
        keys = torch.tensor([41.0, 10.0], dtype=torch.float64)[:, None]
        if words:
            assert torch.all(expected.key_sum > keys)
        else:
            torch.testing.assert_close(expected.key_sum, keys.expand_as(expected.key_sum))
    other = expect(schedule, schedule.steps[0], "gauss")
    assert other.key_sum is None
    assert other.key_factor is None
    assert expect(schedule, schedule.steps[0], "plus_minus_one").key_sum is not None
