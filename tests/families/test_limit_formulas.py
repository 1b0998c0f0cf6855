"""The limits as numbers: each term by itself, so that a factor more or less in one of them shows."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.expected import expect
from attn_testkit.families.rounding import linear_limit, row_limit
from attn_testkit.families.softmax.attention import Attention
from attn_testkit.families.softmax.limits import attention_limit
from attn_testkit.steps.schedule import make_schedule

EXACT = 1e-12
U = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
FLOOR = {"bf16": 4 * 2.0**-133 + 2.0**-110, "fp16": 4 * 2.0**-24 + 2.0**-110, "fp32": 4 * 2.0**-149 + 2.0**-110}
"""Four of the smallest numbers, and what kernels flush to zero."""


def element(
    out: float = 0.0,
    mass: float = 0.0,
    noise: float = 0.0,
    keys: int = 1,
    flat: float | None = None,
    lse: float = 0.0,
) -> Attention:
    def one(number: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), number, dtype=torch.float64)

    return Attention(
        out=one(out),
        mass=one(mass),
        logit_noise=one(noise),
        keys=torch.tensor([keys]),
        lse=one(lse)[..., 0],
        top=one(lse)[..., 0],
        flat=None if flat is None else one(flat),
    )


def limit(attention: Attention, dtype: str, matmul_dtype: str = "model") -> float:
    return float(attention_limit(attention, dtype, matmul_dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("out", "mass"), [(3.0, 5.0), (-3.0, 5.0), (0.0, 1.0), (-2.0, 0.0)])
def test_probabilities_and_output_are_rounded_to_the_dtype(dtype: str, out: float, mass: float) -> None:
    assert limit(element(out, mass), dtype) == pytest.approx(
        2 * U[dtype] * (mass + abs(out)) + FLOOR[dtype], rel=EXACT, abs=0
    )


@pytest.mark.parametrize("keys", [1, 100, 4096])
def test_in_float32_the_sums_round_and_have_as_many_terms_as_there_are_keys(keys: int) -> None:
    assert limit(element(3, 5, keys=keys), "fp32") == pytest.approx(2 * U["fp32"] * (keys + 16) * 8, rel=EXACT, abs=0)


def test_a_logit_moves_by_eight_float32_roundings_of_its_size_and_by_one_at_most() -> None:
    quiet = limit(element(3, 5), "bf16")
    assert limit(element(3, 5, noise=1e3), "bf16") - quiet == pytest.approx(16 * 2.0**-24 * 1e3 * 8, rel=1e-9, abs=0)
    assert limit(element(3, 5, noise=1e30), "bf16") - quiet == pytest.approx(8, rel=1e-9, abs=0)


@pytest.mark.parametrize("dtype", FLOOR)
def test_an_output_of_zero_may_be_a_subnormal_number_and_no_more(dtype: str) -> None:
    assert limit(element(), dtype) == pytest.approx(FLOOR[dtype], rel=EXACT, abs=0)
    zeros = torch.zeros(1, 1, 1, 16, dtype=torch.float64)
    smallest = {"bf16": 0.0, "fp16": 2 * 2.0**-24, "fp32": 0.0}[dtype]
    assert float(row_limit(zeros, dtype)) == pytest.approx(smallest + 4 * 2.0**-110, rel=1e-6, abs=0)


def test_small_probabilities_of_fp16_round_in_absolute_terms_and_those_of_bf16_do_not() -> None:
    for dtype, more in (("fp16", 2 * 2.0**-25 * 7), ("bf16", 0.0)):
        without = limit(element(3, 5), dtype)
        assert limit(element(3, 5, flat=7), dtype) - without == pytest.approx(more, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(("capability", "lost"), [("fp8_e4m3", 2.0**-12), ("fp8_e4m3_unscaled", 2.0**-10)])
def test_fp8_probabilities_round_in_relative_and_in_absolute_terms(capability: str, lost: float) -> None:
    more = limit(element(3, 5, flat=7), "bf16", capability) - limit(element(3, 5), "bf16")
    assert more == pytest.approx(2 * 2.0**-4 * 5 + 2 * lost * 7, rel=1e-9, abs=0)


def test_a_row_keeps_half_of_what_its_elements_may_do_each() -> None:
    limits = torch.tensor([3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 2)
    assert float(row_limit(limits, "bf16")) == pytest.approx(2.5, rel=EXACT, abs=0)
    assert float(row_limit(limits, "fp16")) == pytest.approx(2.5 + 2.0**-23, rel=EXACT, abs=0)
    assert float(row_limit(limits, "bf16", alike=True)) == pytest.approx(5.0, rel=EXACT, abs=0)


def test_a_row_whose_channels_all_round_alike_may_be_as_far_off_as_each_of_them() -> None:
    schedule = make_schedule(parse_case("decode-mqa4-d64-fp16-p16-k447-shuffled-large_and_small_values-b1prod"))
    expected = expect(schedule, schedule.steps[0])
    assert float(expected.attention.std(-1).max()) < 1e-3 * float(expected.attention.min())
    assert (expected.attention_limit.norm(dim=-1) <= expected.row_limit).all()


def test_a_limit_goes_through_a_product_by_the_sizes_of_the_weights() -> None:
    weight = torch.tensor([[1.0, -2.0], [-3.0, 4.0]], dtype=torch.float64)
    limits = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    nothing = torch.zeros_like(limits)
    assert linear_limit(limits, nothing, weight.abs()).tolist() == [[0.5 + 0.75, 1.0 + 1.0]]
    own = linear_limit(nothing, torch.tensor([[-1.0, 2.0]], dtype=torch.float64), weight.abs())
    # Two products, one addition, and one rounding of the sum: four float32 roundings of |value| |W|.
    assert own.tolist() == [[4 * 2.0**-24 * 7, 4 * 2.0**-24 * 10]]
