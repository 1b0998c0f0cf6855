"""The limits: tight enough to show one missing key, wide enough for every way of rounding."""

from dataclasses import replace

import pytest
import torch

from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.rows import Decode
from attn_testkit.families.rounding import row_limit
from attn_testkit.families.softmax.attention import attend
from attn_testkit.families.softmax.limits import attention_limit
from attn_testkit.steps.data import DTYPES, make_layers, make_step_data
from attn_testkit.steps.schedule import make_schedule

LENGTHS = (64, 512, 4096)


def decode(length: int, dtype: str, data: str) -> Case:
    return Case(Decode(), Heads("mha", 2, 2), 64, dtype, 16, (length - 1,), data=data, bucket=1)


def rounded_attention(case: Case, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 attention with P, split partials and output rounded to the dtype, as real kernels round."""
    schedule = make_schedule(case)
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(case)
    exact = attend(data, layers)
    dtype = DTYPES[case.dtype]
    q, keys, values = data.q[:, 0].float(), data.keys[:, 0].float(), data.values[:, 0].float()
    scale = torch.tensor([layer.scaling for layer in layers]).view(-1, 1, 1)
    logits = torch.einsum("lhd,lshd->lhs", q, keys) * scale
    parts, sums, tops = [], [], []
    for chunk, value in zip(logits.chunk(splits, -1), values.chunk(splits, 1), strict=True):
        top = chunk.amax(-1, keepdim=True)
        p = torch.exp(chunk - top)
        tops.append(top)
        sums.append(p.sum(-1, keepdim=True))
        part = torch.einsum("lhs,lshd->lhd", p.to(dtype).float(), value) / sums[-1]
        parts.append(part.to(dtype).float() if splits > 1 else part)
    top = torch.stack(tops).amax(0)
    weights = [s * torch.exp(t - top) for s, t in zip(sums, tops, strict=True)]
    out = sum(w * x for w, x in zip(weights, parts, strict=True)) / sum(weights)
    error = (out.to(dtype).double() - exact.out[:, 0]).abs()
    limit = attention_limit(exact, case.dtype)
    return error, limit[:, 0], row_limit(limit, case.dtype)[:, 0]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("data", ["gauss", "peaked", "shifted", "one_hot", "negative"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("length", [1, 17, *LENGTHS])
def test_honest_rounding_stays_within_the_limits(length: int, dtype: str, data: str, splits: int) -> None:
    error, limit, by_row = rounded_attention(decode(length, dtype, data), min(splits, length))
    assert (error <= limit).all(), f"{float((error / limit).max()):.2f} of the limit"
    assert (error.norm(dim=-1) <= by_row).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_probabilities_that_a_sink_made_small_may_be_rounded_as_the_dtype_rounds_them(dtype: str) -> None:
    case = replace(decode(72, dtype, "gauss"), sinks=True)
    schedule = make_schedule(case)
    data = make_step_data(schedule, schedule.steps[0])
    layers = tuple(replace(layer, sinks=torch.full((2,), 14.0)) for layer in make_layers(case))
    exact = attend(data, layers, flat=True)
    q, keys, values = data.q[:, 0].float(), data.keys[:, 0].float(), data.values[:, 0].float()
    scale = torch.tensor([layer.scaling for layer in layers]).view(-1, 1, 1)
    logits = torch.einsum("lhd,lshd->lhs", q, keys) * scale
    p = torch.exp(logits - 14.0)
    out = torch.einsum("lhs,lshd->lhd", p.to(DTYPES[dtype]).float(), values) / (1 + p.sum(-1, keepdim=True))
    error = (out.to(DTYPES[dtype]).double() - exact.out[:, 0]).abs()
    assert (error <= attention_limit(exact, dtype)[:, 0]).all()
    if dtype == "fp16":
        without = replace(exact, flat=None)
        assert not (error <= attention_limit(without, dtype)[:, 0]).all(), "the allowance is needed"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dropped", ["first", "last", "heaviest"])
def test_one_dropped_key_is_over_the_limit_with_footprint_values(length: int, dtype: str, dropped: str) -> None:
    case = decode(length, dtype, "one_hot")
    schedule = make_schedule(case)
    data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(case)
    exact = attend(data, layers)
    logits = torch.einsum("hd,shd->s", data.q[0, 0].double(), data.keys[0, 0])
    watched = data.values[0, 0].sum((-1, -2)) > 0
    key = {"first": 0, "last": length - 1, "heaviest": int(logits.masked_fill(~watched, -torch.inf).argmax())}[dropped]
    visible = data.visible.clone()
    visible[..., key] = False
    without = attend(data, layers, visible).out
    assert ((without - exact.out).abs() > attention_limit(exact, case.dtype)).any()


@pytest.mark.parametrize("data", ["gauss", "peaked"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_dropped_key_shows_wherever_it_changes_more_than_rounding(length: int, dtype: str, data: str) -> None:
    """Beyond rounding: the change is larger than twice what the dtype's own roundings may do to that element."""
    case = decode(length, dtype, data)
    schedule = make_schedule(case)
    step_data, layers = make_step_data(schedule, schedule.steps[0]), make_layers(case)
    exact = attend(step_data, layers)
    unit = {"fp16": 2.0**-11, "bf16": 2.0**-8}[dtype]
    rounding = 2 * unit * (exact.mass + exact.out.abs())
    limit, shown = attention_limit(exact, dtype), 0
    for key in range(0, length, max(1, length // 16)):
        visible = step_data.visible.clone()
        visible[..., key] = False
        change = (attend(step_data, layers, visible).out - exact.out).abs()
        if (change > 1.1 * rounding).any():
            assert (change > limit).any(), f"key {key} changes the output and is not seen"
            shown += 1
    assert shown or length > 64, "with 64 keys at least one dropped key must be visible"
