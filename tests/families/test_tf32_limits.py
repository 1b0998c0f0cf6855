"""Limits of float32 products: those of tf32 where it is declared, and of float32 elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.families.rounding import UNIT_ROUNDOFF, row_limit
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.families.softmax.attention import attend
from attn_testkit.families.softmax.kv_splits import split_sums
from attn_testkit.running.case_runs.case_run import schedule_for
from attn_testkit.steps.data import StepData, make_layers, make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-gqa2x2-d64-{}-p16-k9.70.300-shuffled-{}-b4prod"
IEEE = TorchNativeBackend.capabilities
TF32 = IEEE.with_changes(precision={"fp32_products": "tf32"})


def cut_off(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return (numbers.float().view(torch.int32) & ~((1 << bits) - 1)).view(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "words", "declared", "products"),
    [
        ("fp32", "gauss", IEEE, "model"),
        ("fp32", "gauss", TF32, "tf32"),
        ("bf16", "gauss", TF32, "model"),
        ("fp32", "gauss-kvfp8e4m3", TF32, "tf32"),
        ("fp32", "gauss-kvfp8e4m3", TF32.with_changes(precision={"matmul_dtype": "fp8_e4m3"}), "fp8_e4m3"),
        ("fp32", "gauss", TF32.with_changes(precision={"matmul_dtype": "fp8_e4m3"}), "tf32"),
    ],
)
def test_the_coarser_of_the_capabilities_that_apply_counts(dtype: str, words: str, declared, products: str) -> None:
    assert schedule_for(parse_case(CASE.format(dtype, words)), declared).matmul_dtype == products


_LEAST = 0.1
"""Of the limit: what tf32 does is not lost in it."""


@pytest.mark.parametrize("data", ["gauss", "peaked", "shifted", "rising_logits"])
def test_factors_of_tf32_are_within_its_limit_and_beyond_that_of_float32(data: str) -> None:
    schedule = make_schedule(parse_case(CASE.format("fp32", data)))
    step_data = make_step_data(schedule, schedule.steps[0])
    assert step_data.stored_values is not None
    want, strict = attend_with_limit(schedule, step_data)
    _, wide = attend_with_limit(schedule.with_numerics(matmul_dtype="tf32"), step_data)

    def furthest(bits: int, limit: torch.Tensor) -> float:
        narrow = replace(
            step_data,
            q=cut_off(step_data.q, bits),
            stored_keys=cut_off(step_data.stored_keys, bits),
            stored_values=cut_off(step_data.stored_values, bits),
        )
        out, _ = attend_with_limit(schedule, narrow)
        return float(((out.out - want.out).abs() / limit).max())

    assert _LEAST < furthest(13, wide) <= 1 < furthest(13, strict)
    assert furthest(17, wide) > 1, "factors of four bits less"


def test_the_numbers_of_a_case_are_the_same_whatever_is_declared() -> None:
    case = parse_case(CASE.format("fp32", "gauss-kvfp8e4m3"))
    plain, narrow = (
        make_step_data(s, s.steps[0]) for s in (make_schedule(case), make_schedule(case, Numerics("tf32")))
    )
    assert torch.equal(plain.q, narrow.q)


LONG = "decode-gqa2x2-d64-fp32-p16-k1500.300.4-shuffled-{}-b4prod"


def rounded(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """To nearest, so many bits of float32 less."""
    words = numbers.float().contiguous().view(torch.int32)
    return ((words + (1 << (bits - 1)) - 1 + ((words >> bits) & 1)) & ~((1 << bits) - 1)).view(torch.float32)


def narrow_attention(data: StepData, layers, narrow) -> torch.Tensor:
    """[L, T, Hq, Dv]: by the formula, where both factors of both products go through ``narrow``."""
    found = []
    for place, layer in enumerate(layers):
        for row, request in enumerate(data.row_request.tolist()):
            seen = data.visible[request, int(data.row_offset[row])]
            keys, values = (narrow(each[place, request][seen]).double() for each in (data.keys, data.values))
            keys, values = (each.repeat_interleave(layer.q_per_kv, 1) for each in (keys, values))
            logits = torch.einsum("hd,shd->hs", narrow(data.q[place, row]).double(), keys) * layer.scaling
            if layer.logit_cap:
                logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
            p = (logits - logits.amax(-1, keepdim=True)).exp()
            found.append(torch.einsum("hs,shd->hd", narrow(p).double(), values) / p.sum(-1)[:, None])
    return torch.stack(found).view(len(layers), -1, *found[0].shape)


@pytest.mark.parametrize("case", [CASE, LONG], ids=["short", "long"])
@pytest.mark.parametrize("words", ["gauss", "peaked", "shifted", "one_hot", "mean", "gauss-cap1.5"])
def test_a_kernel_of_tf32_factors_is_near_its_limit_and_one_of_bf16_factors_beyond(case: str, words: str) -> None:
    name = case.format("fp32", words) if case is CASE else case.format(words)
    schedule = make_schedule(parse_case(name), Numerics("tf32"))
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(schedule.case)
    want, limit = attend_with_limit(schedule, data)
    whole = row_limit(limit, "fp32")

    def furthest(narrow) -> float:
        off = narrow_attention(data, layers, narrow) - want.out
        return float(torch.maximum((off.abs() / limit).max(), (off.norm(dim=-1) / whole).max()))

    assert _LEAST < furthest(lambda numbers: cut_off(numbers.contiguous(), 13)) < 0.8
    assert furthest(lambda numbers: rounded(numbers, 13)) < 0.5, "rounded factors are off by half as much"
    assert furthest(lambda numbers: cut_off(numbers.contiguous(), 16)) > 1, "factors of bf16"


def test_the_limit_of_tf32_is_never_above_all_that_its_errors_can_do_twice() -> None:
    for words in ("gauss", "rising_logits", "peaked-w4-cap1.5-sink"):
        schedule = make_schedule(parse_case(CASE.format("fp32", words)), Numerics("tf32"))
        data = make_step_data(schedule, schedule.steps[0])
        found, limit = attend_with_limit(schedule, data)
        _, strict = attend_with_limit(schedule.with_numerics(matmul_dtype="model"), data)
        unit, sizes = UNIT_ROUNDOFF["tf32"], found.out.abs() + found.mass
        most = (4 * unit * found.logit_noise).clamp(max=1.0) * sizes + 4 * unit * found.mass
        assert (limit > strict).all()
        assert (limit <= (strict + most) * (1 + 1e-12)).all()


PARTS = "decode-gqa2x2-d64-fp32-p16-k9.70.300-shuffled-gauss-{}-b4prod"


@pytest.mark.parametrize("parts", ["lsewhole", "lseprefix", "lsetokens3merged"])
def test_a_log_sum_exp_of_tf32_logits_is_within_its_limit_and_beyond_that_of_float32(parts: str) -> None:
    schedule = make_schedule(parse_case(PARTS.format(parts)), Numerics("tf32"))
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(schedule.case)
    assert data.stored_values is not None
    whole = attend(data, layers)
    lse, wide = split_sums(schedule.case, data, whole, "fp32", "tf32")
    _, strict = split_sums(schedule.case, data, whole, "fp32")
    for bits, within in ((13, True), (17, False)):
        narrow = replace(data, q=cut_off(data.q, bits), stored_keys=cut_off(data.stored_keys, bits))
        found, _ = split_sums(schedule.case, narrow, attend(narrow, layers), "fp32", "tf32")
        off = (found - lse).abs().nan_to_num()
        assert bool((off <= wide).all()) is within
        assert (off > strict).any()
