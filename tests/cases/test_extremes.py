"""Cases of large numbers: each shows one kind of narrow arithmetic, and nothing that is right is over its limit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import DATA, EXTREME_DATA, Case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.families.expected import Expected, expect
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import make_schedule

CAPABILITIES = TorchNativeBackend.capabilities
IN_FP8 = CAPABILITIES.with_changes(precision={"matmul_dtype": "fp8_e4m3", "q_scale": "per_token"})
SCALED = "large_and_small_queries"
UNSCALED = [data for data in EXTREME_DATA if data != SCALED]


@cache
def core(mode: ForwardMode) -> Sequence[Case]:
    """Extreme cases of a mode. Not at import: every process that collects tests would take seconds for it."""
    return [case for case in generate(IN_FP8, mode, "core") if case.data in EXTREME_DATA]


def only_of(mode: ForwardMode, data: str) -> Case:
    (case,) = (case for case in core(mode) if case.data == data)
    return case


def of_values() -> tuple[Case, Case]:
    """Large and small values in fp16 and in bf16."""
    (in_fp16, in_bf16) = (case for case in core(ForwardMode.DECODE) if case.data == "large_and_small_values")
    return in_fp16, in_bf16


def extremes(declared: Capabilities, tier: str = "core") -> list[str]:
    return [case.data for case in generate(declared, ForwardMode.DECODE, tier) if case.data in EXTREME_DATA]


@pytest.mark.parametrize("mode", ForwardMode)
def test_each_mode_has_one_of_each_behind_all_other_cases(mode: ForwardMode) -> None:
    cases = generate(IN_FP8, mode, "core")
    assert list(dict.fromkeys(case.data for case in cases if case.data in EXTREME_DATA)) == list(EXTREME_DATA)
    once = [case for case in core(mode) if case != of_values()[1]]
    assert [case.kv_dtype for case in once] == ["fp8_e4m3", "same", *["fp8_e4m3"] * 2, "same", "same", "fp8_e4m3"]
    assert len(core(mode)) - len(once) == (mode is ForwardMode.DECODE)


def test_only_what_is_declared_and_not_in_smoke() -> None:
    assert extremes(CAPABILITIES, "smoke") == []
    assert extremes(CAPABILITIES.with_changes(kv_pool={"kv_dtypes": {"same"}})) == [
        "large_and_small_values",
        "large_and_small_values",
        "fp16_overflow",
        "beyond_fp16",
    ]
    assert extremes(CAPABILITIES.with_changes(precision={"dtypes": {"bf16"}})) == [
        "saturated",
        "large_and_small_values",
        "large_queries",
        "beyond_fp16",
    ]
    assert extremes(CAPABILITIES.with_changes(precision={"dtypes": {"fp32"}})) == ["saturated", "large_queries"], (
        "nothing of 16 bits"
    )
    assert extremes(CAPABILITIES.with_changes(kv_pool={"kv_dtypes": {"fp8_e4m3"}})) == ["saturated", "large_queries"]
    assert extremes(CAPABILITIES) == ["saturated", "large_and_small_values", *UNSCALED[1:-1]]
    assert extremes(IN_FP8.with_changes(kv_pool={"kv_dtypes": {"same"}})) == [
        "large_and_small_values",
        "large_and_small_values",
        "fp16_overflow",
        "beyond_fp16",
    ]
    unscaled = CAPABILITIES.with_changes(precision={"matmul_dtype": "fp8_e4m3_unscaled"})
    assert extremes(unscaled) == ["saturated", "large_and_small_values", *UNSCALED[1:]], (
        "and those who say that they lose them have them too"
    )
    a_key_less = CAPABILITIES.with_changes(bounds={"max_context_len": 4096})
    assert extremes(a_key_less) == ["saturated", "large_queries", "fp16_overflow", "beyond_fp16"], (
        "with its token it is longer"
    )
    assert not set(DATA) & set(EXTREME_DATA), "no covering array has them"


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_new_key_and_value_is_beyond_fp8_and_no_logit_is(mode: ForwardMode) -> None:
    case = only_of(mode, "saturated")
    schedule = make_schedule(case)
    data = make_step_data(schedule, schedule.steps[0])
    for index, layer in enumerate(make_layers(case)):
        assert (data.k[index].float().abs().amax(-1) / layer.k_scale > 448).all()
        assert (data.v[index].float().abs().amax(-1) / layer.v_scale > 448).all()
    assert data.stored_keys.float().isfinite().all()
    assert float((data.q.float() @ data.k.float().mT).abs().max()) < 200
    assert expect(schedule, schedule.steps[0]).attention.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_sum_of_16_bits_is_over_the_limit_from_either_end_and_one_of_32_is_not(
    dtype: torch.dtype, backwards: bool
) -> None:
    schedule = make_schedule(of_values()[0])
    wanted = expect(schedule, schedule.steps[0])
    values = wanted.data.values[:, 0, :, 0]
    total = torch.zeros(len(values), values.shape[-1], dtype=dtype)
    for tile in (values.flip(1) if backwards else values).split(16, 1):
        total = (total.float() + tile.sum(1).float()).to(dtype)
    error = (total.double() / values.shape[1] - wanted.attention[:, 0, 0]).abs()
    assert bool((error > wanted.attention_limit[:, 0, 0]).all()) is (dtype is torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_parts_that_is_kept_in_bf16_is_over_the_limit_and_rounded_parts_are_not(dtype: torch.dtype) -> None:
    wanted = expect(schedule := make_schedule(of_values()[1]), schedule.steps[0])
    values = wanted.data.values[:, 0, :, 0]
    parts = [part.sum(1) / values.shape[1] for part in values.split(1024, 1)]
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = (total + part.bfloat16()).to(dtype)
    assert len(parts) == 17
    error = (total.bfloat16().double() - wanted.attention[:, 0, 0]).abs()
    assert bool((error > wanted.attention_limit[:, 0, 0]).any()) is (dtype is torch.bfloat16)


@pytest.mark.parametrize("products", ["", "fp8_e4m3"])
@pytest.mark.parametrize("mode", ForwardMode)
def test_loud_queries_are_within_fp8_and_beyond_240_and_their_logits_are_usual(
    mode: ForwardMode, products: str
) -> None:
    case = only_of(mode, "large_queries")
    schedule = make_schedule(case, Numerics(matmul_dtype=products))
    data = make_step_data(schedule, schedule.steps[0])
    largest = data.q.float().abs().amax(-1)
    assert ((largest >= 256) & (largest <= 448)).all()
    if products:
        assert torch.equal(data.q.float().to(torch.float8_e4m3fn).float(), data.q.float())
    for index, layer in enumerate(make_layers(case)):
        last = data.q[index, :, :, -1].double()
        heads = data.stored_keys.shape[-2]
        # [T, S, Hk]: of the own request's keys, the part of the logits that the one channel makes.
        of_row = data.keys[index, data.row_request][..., -1]
        part = (last[:, None].unflatten(-1, (heads, -1)) * of_row[..., None]).flatten(-2) * layer.scaling
        seen = data.visible[data.row_request, data.row_offset]
        assert 0.1 < float(part[seen].std()) < 3, "as much as all other channels, in units of a logit"
        limited = (last.clamp(-224, 224) - last)[:, None].unflatten(-1, (heads, -1)) * of_row[..., None]
        assert float(limited.flatten(-2)[seen].abs().max() * layer.scaling) > 0.05


@pytest.mark.parametrize("mode", ForwardMode)
def test_three_towering_values_are_beyond_16_bits_and_no_output_is(mode: ForwardMode) -> None:
    case = only_of(mode, "fp16_overflow")
    wanted, held = held_values(case)
    largest = float(torch.finfo(torch.float16).max)
    assert case.dtype == "fp16"
    assert float(held.abs().min()) * 3 > largest
    assert float(held.abs().max()) * 2 < largest
    assert bool((held[:, :1].sign() == held.sign()).all()), "a channel has one sign"
    assert 20_000 < float(wanted.attention.abs().max()) < largest


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_colossal_key_and_value_is_beyond_fp16(mode: ForwardMode) -> None:
    case = only_of(mode, "beyond_fp16")
    wanted, held = held_values(case)
    largest = float(torch.finfo(torch.float16).max)
    assert case.dtype == "bf16"
    assert float(held.abs().min()) > largest
    assert bool((wanted.data.k.abs() > largest).all())
    assert not wanted.data.q.any()
    assert largest < float(wanted.attention.abs().max()) < 10 * largest


def held_values(case: Case) -> tuple[Expected, torch.Tensor]:
    """What is due at the first step, and [L, keys, Hk, Dv]: the values of all its requests."""
    schedule = make_schedule(case)
    wanted = expect(schedule, schedule.steps[0])
    lens = schedule.steps[0].lens
    return wanted, torch.cat([wanted.data.values[:, i, :length] for i, length in enumerate(lens)], 1)
