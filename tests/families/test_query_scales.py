"""Queries that are scaled and rounded to FP8: exact where the kit makes them so, limited by what rounding may do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attn_testkit.cases.case import DATA, EXTREME_DATA, Case, parse_case
from attn_testkit.contract import Capabilities, ForwardMode, KVPools, Precision
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.families.softmax.attention import attend
from attn_testkit.families.softmax.limits import attention_limit, lse_limit
from attn_testkit.families.softmax.query_rounding import query_rounding
from attn_testkit.steps.data import StepData, make_layers, make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.query_scales import held_queries, large_or_small, some_zeros
from attn_testkit.steps.schedule import Schedule, make_schedule

FP8 = torch.float8_e4m3fn
SCALED = ("per_token_head", "per_token", "per_tensor")
CASES = {
    "gqa": "target-verify-gqa2x2-d64-{dtype}-p16-k33.7.3-chain4-shuffled-{data}-kvfp8e4m3-b4prod",
    "mla": "target-verify-mla4-d128r32-{dtype}-p16-k33.7.3-chain4-shuffled-{data}-kvfp8e4m3-b4prod",
}
GROUPS = {"per_token_head": (3,), "per_token": (2, 3), "per_tensor": (1, 2, 3)}


def case_of(data: str, heads: str = "gqa", dtype: str = "bf16") -> Case:
    return parse_case(CASES[heads].format(data=data, dtype=dtype))


def made(q_scale: str, data: str, heads: str = "gqa", dtype: str = "bf16") -> tuple[Schedule, StepData]:
    schedule = make_schedule(case_of(data, heads, dtype), Numerics("fp8_e4m3", q_scale=q_scale))
    return schedule, make_step_data(schedule, schedule.steps[0])


def rounded(q: torch.Tensor, q_scale: str, *, power_of_two: bool = False, least: float = 2.0**-40) -> torch.Tensor:
    """What a kernel makes of ``q``, in float32, by its own arithmetic."""
    scale = (q.float().abs().amax(GROUPS[q_scale], keepdim=True) / 448).clamp(min=least)
    scale = torch.exp2(scale.log2().ceil()) if power_of_two else scale
    return (q.float() / scale).to(FP8).float() * scale


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("heads", CASES)
@pytest.mark.parametrize(
    "data", [*DATA, "saturated", "large_queries", "small_weights", "plus_minus_one", "large_and_small_queries"]
)
def test_queries_are_exact_under_the_declared_scale_and_under_those_of_fewer_numbers(
    data: str, heads: str, dtype: str
) -> None:
    for declared in SCALED:
        _, drawn = made(declared, data, heads, dtype)
        has_zeros = data == "gauss" and declared != "per_tensor"
        assert bool((drawn.q == 0).all(-1).any()) is has_zeros, "of a token or a head"
        for finer in SCALED[: SCALED.index(declared) + 1]:
            if (declared, finer, data) == ("per_tensor", "per_tensor", "large_and_small_queries"):
                continue
            for how in ({}, {"power_of_two": True}, {"least": 1 / (448 * 512)}):
                # A scale of amax / 448 is rounded in float32, and so is its product.
                torch.testing.assert_close(rounded(drawn.q, finer, **how), drawn.q.float(), rtol=2.0**-22, atol=0)
            assert query_rounding(drawn.q, finer) is None


@pytest.mark.parametrize("data", ["mean", "plus_minus_one"])
def test_equal_weights_stay_equal_where_no_query_is_zero(data: str) -> None:
    for declared in ("none", *SCALED):
        schedule, drawn = made(declared, data)
        assert bool(drawn.q.any()) is (declared != "none")
        attention = attend(drawn, make_layers(schedule.case))
        assert torch.all(attention.top == 0)


def test_large_queries_are_beyond_fp8_and_small_ones_are_lost_by_it_and_both_are_in_a_step() -> None:
    for declared in ("per_token_head", "per_token"):
        _, drawn = made(declared, "large_and_small_queries")
        largest = drawn.q.float().abs().amax(-1)
        large, small = largest == 1792, largest < 2.0**-7
        assert bool((large | small).all())
        assert bool(large.any())
        assert bool(small.any())
        cast = drawn.q.float().clamp(-448, 448).to(FP8).float()
        assert bool((cast.abs().amax(-1)[large] == 448).all())
        assert bool(((cast != 0).sum(-1)[small] == 1).all()), "but for the number that meets keys of 0"
        # Heads of one token share its scale, where they share one.
        assert bool((large == large[..., :1]).all()) is (declared == "per_token")
        lost = rounded(drawn.q, "per_tensor")
        assert not lost[small].any(), "one scale for the tensor leaves nothing of them"


def test_steps_with_one_scale_for_all_rows_are_all_large_all_small_or_both() -> None:
    schedule = make_schedule(case_of("large_and_small_queries"), Numerics("fp8_e4m3", q_scale="per_tensor"))
    kinds = set()
    for step in schedule.steps:
        for layer in make_step_data(schedule, step).q.float().abs().amax(-1) if step.requests else ():
            kinds.add((bool((layer == 1792).any()), bool((layer < 1).any())))
    assert kinds == {(True, False), (False, True), (True, True)}


@pytest.mark.parametrize("q_scale", SCALED)
@pytest.mark.parametrize("data", ["gauss", "peaked", "shifted", "large_queries"])
def test_queries_that_anybody_drew_are_rounded_within_their_limit(q_scale: str, data: str) -> None:
    """Numbers of no grid: the bound is of each number, and is nearly reached."""
    _, drawn = made("none", data)
    q = drawn.q.float() * torch.linspace(0.6, 1.7, drawn.q.shape[1]).view(1, -1, 1, 1)
    off = query_rounding(q, q_scale)
    assert off is not None
    for power_of_two in (False, True):
        error = (rounded(q, q_scale, power_of_two=power_of_two) - q).abs().double()
        assert bool((error <= off * (1 + 2.0**-20)).all())
        assert float((error / off.clamp(min=1e-30)).max()) > 0.7


def test_the_bound_is_a_sixteenth_of_a_number_and_below_the_normal_numbers_half_a_spacing_of_the_scale() -> None:
    q = torch.tensor([448.0 * 1.1, 3.0, 0.011, 0.0005]).view(1, 1, 1, 4)
    off = query_rounding(q, "per_token_head")
    assert off is not None
    want = [448 * 1.1 / 16, 3 / 16, 2 * 2.0**-10, 0.0005]
    assert off.flatten().tolist() == pytest.approx(want, rel=1e-6)
    assert query_rounding(q, "none") is None
    exact = torch.tensor([448.0, 0.5, 2.0**-9, -7 * 2.0**-9]).view(1, 1, 1, 4)
    for size in (1.0, 4.0, 2.0**-17):
        assert query_rounding(exact * size, "per_token_head") is None
    two = torch.stack([exact[0], exact[0] * 2.0**-17], 1)
    assert query_rounding(two, "per_token") is None, "one token each"
    of_tensor = query_rounding(two, "per_tensor")
    assert of_tensor is not None
    assert not of_tensor[:, 0].any(), "the large row is on the grid of the tensor"
    want = torch.tensor([2.0**-10, *two[0, 1, 0, 1:].abs().tolist()], dtype=torch.float64)
    assert torch.equal(of_tensor[0, 1, 0], want), "numbers of the small one may vanish, and be off by no more"


@pytest.mark.parametrize("q_scale", SCALED)
def test_a_rounded_query_moves_the_answer_within_the_limit_and_an_undeclared_one_beyond_it(q_scale: str) -> None:
    schedule, drawn = made("none", "gauss")
    data = replace(drawn, q=drawn.q.float() * 1.3)
    declared = schedule.with_numerics(q_scale=q_scale)
    exact, limit = attend_with_limit(declared, data)
    _, strict = attend_with_limit(schedule, data)
    off = (attend(replace(data, q=rounded(data.q, q_scale)), make_layers(schedule.case)).out - exact.out).abs()
    assert bool((off <= limit).all())
    assert bool((limit > strict).all())
    wrong = (attend(replace(data, q=data.q * 1.8), make_layers(schedule.case)).out - exact.out).abs()
    assert bool((wrong > strict).any())


def test_by_hand_a_logit_that_is_off_by_e_widens_the_limit_by_expm1_of_2e() -> None:
    schedule, drawn = made("per_token", "gauss")
    layers = make_layers(schedule.case)
    attention = attend(drawn, layers, flat=True, q_scale="per_token")
    assert attention.logit_error is None
    error = 0.25
    moved = replace(attention, logit_error=torch.full_like(attention.logit_noise, error))
    plain, wide = (attention_limit(each, "bf16", "fp8_e4m3") for each in (attention, moved))
    factor = torch.tensor(2 * error, dtype=torch.float64)
    torch.testing.assert_close(wide, plain * factor.exp() + attention.mass * factor.expm1(), rtol=1e-12, atol=0)
    lse = lse_limit(moved, "bf16", "fp32", "fp8_e4m3") - lse_limit(attention, "bf16", "fp32", "fp8_e4m3")
    torch.testing.assert_close(lse, torch.full_like(lse, error), rtol=1e-9, atol=1e-12)
    huge = replace(attention, logit_error=torch.full_like(attention.logit_noise, 1e6))
    assert attention_limit(huge, "bf16", "fp8_e4m3").isfinite().all()


def test_the_error_of_a_logit_is_that_of_the_keys_which_its_row_sees() -> None:
    """By hand: sum of |dq| |k|, scaled, of the worst visible key; and the same one request at a time."""
    schedule, drawn = made("none", "gauss")
    data = replace(drawn, q=drawn.q.float() * 1.3)
    layers = make_layers(schedule.case)
    found = attend(data, layers, q_scale="per_token").logit_error
    off = query_rounding(data.q, "per_token")
    assert found is not None
    assert off is not None
    for index, layer in enumerate(layers):
        for row in (0, 5, 11):
            request, offset = int(data.row_request[row]), int(data.row_offset[row])
            seen = data.visible[request, offset]
            for head in range(layer.tp_q_head_num):
                keys = data.keys[index, request, seen, head // layer.q_per_kv].abs()
                want = float((keys @ off[index, row, head]).max()) * layer.scaling
                assert float(found[index, row, head, 0]) == pytest.approx(want, rel=1e-9)
    long = make_schedule(
        parse_case("decode-gqa2x2-d64-bf16-p16-k9000.40-shuffled-gauss-kvfp8e4m3-b2prod"), Numerics("fp8_e4m3")
    )
    drawn = make_step_data(long, long.steps[0])
    data = replace(drawn, q=drawn.q.float() * 1.3)
    apart = attend(data, make_layers(long.case), q_scale="per_tensor").logit_error
    bound = query_rounding(data.q, "per_tensor")
    assert apart is not None
    assert bound is not None
    keys = data.keys[1, 1, :41, 1].abs()
    want = float((keys @ bound[1, 1, 3]).max()) * make_layers(long.case)[1].scaling
    assert float(apart[1, 1, 3, 0]) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("q_scale", SCALED)
@pytest.mark.parametrize("heads", CASES)
def test_small_rows_may_vanish_with_one_scale_for_all_rows_alone(q_scale: str, heads: str) -> None:
    """Every declared scale holds its own rounding; a small row that a tensor's scale loses is over the others'."""
    schedule = make_schedule(case_of("large_and_small_queries", heads), Numerics("fp8_e4m3", q_scale=q_scale))
    over = []
    for step in (step for step in schedule.steps if step.requests):
        wanted, layers = expect(schedule, step), make_layers(schedule.case)
        for kind in SCALED:
            found = attend(replace(wanted.data, q=rounded(wanted.data.q, kind)), layers).out
            right = bool(((found - wanted.attention).abs() <= wanted.attention_limit).all())
            if SCALED.index(kind) <= SCALED.index(q_scale):
                assert right, kind
            over += [kind] * (not right)
    assert ("per_tensor" in over) is (q_scale != "per_tensor")


@pytest.mark.parametrize("declared", ["per_token", "per_tensor"])
def test_queries_that_are_cut_off_or_not_multiplied_back_are_over_the_limit(declared: str) -> None:
    schedule = make_schedule(case_of("large_and_small_queries"), Numerics("fp8_e4m3", q_scale=declared))
    layers, over = make_layers(schedule.case), set()
    for step in (step for step in schedule.steps if step.requests):
        wanted = expect(schedule, step)
        q = wanted.data.q.float()
        scale = q.abs().amax(GROUPS[declared], keepdim=True) / 448
        wrong = {
            "cut off": q.clamp(-448, 448),
            "too small": q.to(FP8).float().where(q.abs() < 1, q),
            "not multiplied back": q / scale,
            "scale of the token before": q / scale * scale.roll(1, 1),
        }
        for name, queries in wrong.items():
            off = (attend(replace(wanted.data, q=queries), layers).out - wanted.attention).abs()
            over |= {name} if bool((off > wanted.attention_limit).any()) else set()
    # One scale is every token's.
    assert over == set(wrong) - ({"scale of the token before"} if declared == "per_tensor" else set())


def test_faint_weights_lie_as_far_apart_as_without_a_scale() -> None:
    for declared in ("none", *SCALED):
        schedule, drawn = made(declared, "small_weights")
        attention = attend(drawn, make_layers(schedule.case))
        assert 6.8 < float(attention.top[0].min()) < 7.8


def test_held_queries_keep_zeros_and_the_sign_and_the_largest_is_448_times_a_power_of_two() -> None:
    q = torch.randn(2, 5, 3, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 5).view(1, 5, 1, 1)
    q[0, 1, 2] = 0
    held = held_queries(q, "per_token", ())
    assert not held[0, 1, 2].any()
    largest = held.abs().amax(-1) / 448
    assert bool(((torch.frexp(largest).mantissa == 0.5) | (largest == 0)).all())
    ratio = (held / q).nan_to_num(1.0)
    assert bool(((ratio == 0) | ((ratio > 0.6) & (ratio < 1.6))).all())
    kept = large_or_small(q, "per_token", np.random.default_rng(0))
    assert bool(((kept == q) | (kept == 0)).all())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("heads", CASES)
@pytest.mark.parametrize(
    "data", [*DATA, "saturated", "large_queries", "small_weights", "plus_minus_one", "large_and_small_queries"]
)
def test_queries_are_exact_under_the_scale_of_a_checkpoint(data: str, heads: str, dtype: str) -> None:
    schedule, drawn = made("static", data, heads, dtype)
    scales = torch.tensor([layer.q_scale for layer in make_layers(schedule.case)]).view(-1, 1, 1, 1)
    for divided in (drawn.q.float() / scales, drawn.q.float() * (1 / scales)):
        assert float(divided.abs().max()) <= 448
        assert torch.equal((divided.to(FP8).float() * scales).to(drawn.q.dtype), drawn.q)
    if data == "large_and_small_queries":
        assert float(drawn.q[0].abs().max()) > 2 * 448
        assert 0 < float(drawn.q[1].float().abs().max()) < 2.0**-8
        assert not drawn.q[1].float()[..., -1].any()


def test_layers_have_a_scale_of_queries_over_a_pool_of_another_dtype_only() -> None:
    case = case_of("gauss")
    assert [layer.q_scale for layer in make_layers(case)] == [5.0, 0.375]
    assert [layer.q_scale for layer in make_layers(case.with_changes(kv_dtype="same"))] == [1.0, 1.0]


def test_a_scale_is_declared_of_fp8_products_alone_and_spelled_right() -> None:
    fp8 = Capabilities(
        eager={ForwardMode.DECODE},
        kv_pool=KVPools(kv_dtypes={"fp8_e4m3"}),
        precision=Precision(matmul_dtype="fp8_e4m3"),
    )
    assert fp8.precision.q_scale == "none"
    for q_scale in (*SCALED, "static"):
        assert fp8.with_changes(precision={"q_scale": q_scale}).precision.q_scale == q_scale
        with pytest.raises(ValueError, match="write matmul_dtype='fp8_e4m3', or leave q_scale out"):
            fp8.with_changes(precision={"q_scale": q_scale, "matmul_dtype": "model"})
    with pytest.raises(ValueError, match="did you mean 'per_token'"):
        fp8.with_changes(precision={"q_scale": "pertoken"})
    assert "large_and_small_queries" in EXTREME_DATA


def test_every_fourth_group_of_gauss_queries_with_a_scale_of_its_own_is_zeros() -> None:
    q = torch.ones(2, 6, 3, 8)
    tokens, heads = some_zeros(q, "per_token"), some_zeros(q, "per_token_head")
    assert (tokens == 0).all(-1).nonzero().tolist() == [[a, b, c] for a, b in ((0, 3), (1, 2)) for c in range(3)]
    assert sorted((a + b + c) % 4 for a, b, c in (heads == 0).all(-1).nonzero().tolist()) == [3] * 9
    assert torch.equal(some_zeros(q, "per_tensor"), q)
