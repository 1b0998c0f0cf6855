"""What of a backend's capabilities the numbers of a case follow, and that equal numbers are one schedule."""

from __future__ import annotations

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, ForwardMode, KVPools, Precision
from attn_testkit.contract.merging import LogSumExp
from attn_testkit.steps.numerics import MODEL, Numerics, numerics_of
from attn_testkit.steps.schedule import forget_schedules, make_schedule

BF16 = "extend-gqa2x2-d32-bf16-p4-k9.6-n3a3.1-shuffled-gauss-b2prod"
FP32 = BF16.replace("bf16", "fp32")
FP8 = BF16.replace("-b2", "-kvfp8e4m3-b2")
PARTS = BF16.replace("-b2", "-lsewhole-b2")
CAPABILITIES = Capabilities(
    eager={"extend", "decode"},
    kv_pool=KVPools(kv_dtypes={"same", "fp8_e4m3"}),
    precision=Precision(
        matmul_dtype="fp8_e4m3", q_scale="per_tensor", new_rows_as_given={"extend"}, fp32_products="tf32"
    ),
    lse=LogSumExp(base="2", dtype="model", whole={"extend"}),
)


@pytest.mark.parametrize(
    ("case", "numerics"),
    [
        (BF16, MODEL),
        (FP32, Numerics(matmul_dtype="tf32")),
        (FP8, Numerics("fp8_e4m3", new_rows_as_given=True, q_scale="per_tensor")),
        (PARTS, Numerics(lse_dtype="model")),
    ],
)
def test_a_case_has_the_numerics_of_what_it_does(case: str, numerics: Numerics) -> None:
    assert numerics_of(parse_case(case), CAPABILITIES) == numerics
    assert numerics_of(parse_case(case), Capabilities(eager={"extend"})) == MODEL


def test_new_rows_are_given_in_the_modes_that_are_declared() -> None:
    others = CAPABILITIES.with_changes(precision={"new_rows_as_given": frozenset({ForwardMode.DECODE})})
    assert not numerics_of(parse_case(FP8), others).new_rows_as_given


def test_equal_numerics_are_one_schedule_however_they_are_written_until_schedules_are_forgotten() -> None:
    case = parse_case(BF16)
    first = make_schedule(case)
    assert make_schedule(case, Numerics()) is make_schedule(case, numerics=Numerics("model")) is first
    assert make_schedule(case, Numerics("tf32")) is not first
    forget_schedules()
    assert make_schedule(case) is not first
    changed = first.with_numerics(q_scale="per_tensor")
    assert (changed.q_scale, changed.steps, first.q_scale) == ("per_tensor", first.steps, "none")
