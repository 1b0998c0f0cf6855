"""Limits of backends that multiply in FP8: they follow from what FP8 rounding does, and still show a missing key."""

import pytest
import torch

from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.rows import Decode
from attn_testkit.contract import Capabilities, ForwardMode, Precision
from attn_testkit.families.rounding import row_limit
from attn_testkit.families.softmax.attention import Attention, attend
from attn_testkit.families.softmax.limits import attention_limit
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import make_schedule

FP8 = torch.float8_e4m3fn


def decode(length: int, data: str, dim: int = 64) -> Case:
    heads = Heads("mha", 2, 2)
    return Case(
        Decode(), heads, dim, "bf16", 16, (length - 1,), data=data, bucket=1, kv_dtype="fp8_e4m3"
    )  # fmt: skip


def fp8_error(case: Case, factor: float = 4.0) -> tuple[torch.Tensor, Attention]:
    """|error| [L, 1, H, D] of float32 attention whose probabilities, times ``factor``, are rounded to FP8."""
    schedule = make_schedule(case, Numerics("fp8_e4m3"))
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(case)
    exact = attend(data, layers, flat=True)
    scale = torch.tensor([layer.scaling for layer in layers]).view(-1, 1, 1)
    logits = torch.einsum("lhd,lshd->lhs", data.q[:, 0].float(), data.keys[:, 0].float()) * scale
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    out = torch.einsum("lhs,lshd->lhd", (p * factor).to(FP8).float() / factor, data.values[:, 0].float()) / p.sum(
        -1, keepdim=True
    )
    return (out.bfloat16().double() - exact.out[:, 0]).abs()[:, None], exact


@pytest.mark.parametrize("data", ["gauss", "peaked", "shifted", "one_hot", "negative", "mean", "small_weights"])
@pytest.mark.parametrize("length", [1, 17, 512, 4096])
@pytest.mark.parametrize(
    ("capability", "factor"),
    [("fp8_e4m3", 4.0), ("fp8_e4m3", 448.0), ("fp8_e4m3_unscaled", 1.0), ("fp8_e4m3_unscaled", 7.0)],
)
def test_probabilities_rounded_to_fp8_stay_within_the_limit(
    length: int, data: str, capability: str, factor: float
) -> None:
    error, exact = fp8_error(decode(length, data), factor)
    limit = attention_limit(exact, "bf16", capability)
    assert (error <= limit).all()
    assert (error.norm(dim=-1) <= row_limit(limit, "bf16")).all()


def test_small_weights_that_vanish_are_over_the_limit_of_who_says_that_there_is_a_factor() -> None:
    error, exact = fp8_error(decode(1501, "small_weights"), 1.0)
    limit = attention_limit(exact, "bf16", "fp8_e4m3")
    assert (error.norm(dim=-1) > 1.5 * row_limit(limit, "bf16"))[0].all(), "layer 0, whose weights lie that far apart"


@pytest.mark.parametrize("length", [17, 512])
def test_the_limit_is_near_what_one_rounded_probability_does(length: int) -> None:
    error, exact = fp8_error(decode(length, "one_hot"))
    assert float((error / attention_limit(exact, "bf16", "fp8_e4m3")).max()) > 0.25


@pytest.mark.parametrize("data", ["gauss", "peaked", "shifted", "one_hot"])
def test_fp8_probabilities_are_over_the_limit_of_a_backend_that_does_not_declare_them(data: str) -> None:
    error, exact = fp8_error(decode(17, data))
    assert (error > attention_limit(exact, "bf16")).any()


@pytest.mark.parametrize("length", [64, 512, 4096])
def test_a_dropped_key_shows_with_footprint_values(length: int) -> None:
    case = decode(length, "one_hot")
    _, exact = fp8_error(case)
    schedule = make_schedule(case, Numerics("fp8_e4m3"))
    data = make_step_data(schedule, schedule.steps[0])
    visible = data.visible.clone()
    visible[..., -1] = False
    change = (attend(data, make_layers(case), visible).out - exact.out).abs()
    assert (change > attention_limit(exact, "bf16", "fp8_e4m3")).any()


@pytest.mark.parametrize("data", ["gauss", "peaked", "negative", "one_hot"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_of_an_fp8_kernel_are_numbers_of_fp8_and_keys_fit_its_range(data: str, dim: int) -> None:
    case = decode(33, data, dim)
    for matmul_dtype in ("fp8_e4m3", "fp8_e4m3_unscaled", "model"):
        schedule = make_schedule(case, Numerics(matmul_dtype))
        drawn = make_step_data(schedule, schedule.steps[0])
        held = torch.equal(drawn.q.float().to(FP8).float(), drawn.q.float())
        # Those of -6e4 logits are powers of two in any case.
        assert held == (matmul_dtype != "model" or data == "negative")
        assert float(drawn.stored_keys.float().abs().max()) < torch.finfo(FP8).max
        assert float(drawn.q.abs().max()) <= 448


def test_without_fp8_in_the_capabilities_limits_are_those_of_the_models_dtype() -> None:
    case = decode(17, "gauss")
    plain, fp8 = make_schedule(case), make_schedule(case, Numerics("fp8_e4m3"))
    assert (plain.matmul_dtype, fp8.matmul_dtype) == ("model", "fp8_e4m3")
    assert make_schedule(case) is plain
    assert Capabilities(eager={ForwardMode.DECODE}).precision.matmul_dtype == "model"
    with pytest.raises(ValueError, match="did you mean 'fp8_e4m3'"):
        Capabilities(eager={ForwardMode.DECODE}, precision=Precision(matmul_dtype="fp8"))
