"""Limits of float32 products: those of tf32 where it is claimed, and of float32 elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.data import make_step_data
from attn_testkit.cases.schedule import make_schedule
from attn_testkit.oracle.expect import attend_with_limit
from attn_testkit.running.case_run import schedule_for

CASE = "decode-gqa2x2-d64-{}-p16-k9.70.300-shuffled-{}-b4prod"
IEEE = TorchNativeBackend.capabilities
TF32 = IEEE.with_changes(fp32_products="tf32")


def cut_off(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return (numbers.float().view(torch.int32) & ~((1 << bits) - 1)).view(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "words", "claims", "products"),
    [
        ("fp32", "gauss", IEEE, "model"),
        ("fp32", "gauss", TF32, "tf32"),
        ("bf16", "gauss", TF32, "model"),
        ("fp32", "gauss-kvfp8e4m3", TF32, "tf32"),
        ("fp32", "gauss-kvfp8e4m3", TF32.with_changes(matmul_dtype="fp8_e4m3"), "fp8_e4m3"),
        ("fp32", "gauss", TF32.with_changes(matmul_dtype="fp8_e4m3"), "tf32"),
    ],
)
def test_the_coarser_of_the_claims_that_apply_counts(dtype: str, words: str, claims, products: str) -> None:
    assert schedule_for(parse_case(CASE.format(dtype, words)), claims).matmul_dtype == products


@pytest.mark.parametrize("data", ["gauss", "peaked", "shifted", "cliff"])
def test_factors_of_tf32_are_within_its_limit_and_beyond_that_of_float32(data: str) -> None:
    schedule = make_schedule(parse_case(CASE.format("fp32", data)))
    step_data = make_step_data(schedule, schedule.steps[0])
    assert step_data.stored_values is not None
    want, strict = attend_with_limit(schedule, step_data)
    _, wide = attend_with_limit(replace(schedule, matmul_dtype="tf32"), step_data)

    def furthest(bits: int, limit: torch.Tensor) -> float:
        narrow = replace(
            step_data,
            q=cut_off(step_data.q, bits),
            stored_keys=cut_off(step_data.stored_keys, bits),
            stored_values=cut_off(step_data.stored_values, bits),
        )
        out, _ = attend_with_limit(schedule, narrow)
        return float(((out.out - want.out).abs() / limit).max())

    assert furthest(13, wide) <= 1 < furthest(13, strict)
    assert furthest(20, wide) > 1, "factors of three bits"


def test_the_numbers_of_a_case_are_the_same_whatever_is_claimed() -> None:
    case = parse_case(CASE.format("fp32", "gauss-kvfp8e4m3"))
    plain, narrow = (make_step_data(s, s.steps[0]) for s in (make_schedule(case), make_schedule(case, "tf32")))
    assert torch.equal(plain.q, narrow.q)
