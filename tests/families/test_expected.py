"""What a step should give beyond its attention: hidden states, logits, and how the limits reach them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.expected import expect
from attn_testkit.families.rounding import linear_limit
from attn_testkit.families.softmax.answer import attend_with_limit
from attn_testkit.families.softmax.attention import attend, windowed
from attn_testkit.model import make_weights
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import Schedule, make_schedule

DECODE = "decode-gqa2x2-d32-{}-p4-k0.5.20-shuffled-gauss{}-b3prod"
V1 = "draft-extend-gqa2x2-d32-bf16-p16-k5.9.7-n4a1.3.4-reversed-gauss-b3prod"


def schedule_of(case_id: str, matmul_dtype: str = "model") -> Schedule:
    return make_schedule(parse_case(case_id), Numerics(matmul_dtype))


@pytest.mark.parametrize("case_id", [DECODE.format("bf16", ""), V1])
def test_hidden_states_are_those_before_plus_each_layers_product(case_id: str) -> None:
    schedule = schedule_of(case_id)
    got = expect(schedule, schedule.steps[0])
    weights = make_weights(len(got.attention), got.attention.shape[2] * got.attention.shape[3])
    hidden, allowed = got.data.hidden.double(), torch.zeros_like(got.data.hidden).double()
    for layer in range(2):
        rows, limits = got.attention[layer].flatten(1), got.attention_limit[layer].flatten(1)
        hidden = hidden + rows @ weights.out[layer].double()
        allowed = allowed + linear_limit(limits, rows, weights.out[layer].double().abs())
    allowed = allowed + 3 * 2.0**-24 * hidden.abs()
    live = [0, 3, 7] if "draft" in case_id else [0, 1, 2]
    assert torch.allclose(got.hidden, hidden[live], rtol=1e-12, atol=0)
    assert torch.allclose(got.hidden_limit, allowed[live], rtol=1e-12, atol=0)
    head = weights.head.double()
    assert torch.allclose(got.logits, hidden[live] @ head, rtol=1e-9, atol=1e-12)
    assert torch.allclose(got.logits_limit, linear_limit(got.hidden_limit, got.hidden, head.abs()), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("dtype", "words", "matmul_dtype", "flat"),
    [
        ("fp16", "", "model", False),
        ("bf16", "-sink", "model", False),
        ("fp16", "-sink", "model", True),
        ("bf16", "-kvfp8e4m3", "fp8_e4m3", True),
    ],
)
def test_absolute_errors_of_probabilities_are_allowed_where_they_happen(
    dtype: str, words: str, matmul_dtype: str, flat: bool
) -> None:
    schedule = schedule_of(DECODE.format(dtype, words), matmul_dtype)
    attention, _ = attend_with_limit(schedule, expect(schedule, schedule.steps[0]).data)
    assert (attention.flat is not None) is flat


def test_what_the_flat_probabilities_give_is_computed_where_it_is_asked_for_alone() -> None:
    schedule = schedule_of(DECODE.format("fp16", ""))
    data, layers = expect(schedule, schedule.steps[0]).data, make_layers(schedule.case)
    assert attend(data, layers).flat is None
    assert attend(data, layers, flat=True).flat is not None


@pytest.mark.parametrize("words", ["", "-w4", "-cap1.5", "-sink"])
def test_what_limits_scale_with_is_what_one_would_write_down(words: str) -> None:
    """Row by row: sum of p |v|, its like for a flat p, the largest logit of the row, and the keys that it may see."""
    schedule = schedule_of(DECODE.format("bf16", words))
    step, case = schedule.steps[0], schedule.case
    data, layers = expect(schedule, step).data, make_layers(case)
    got = attend(data, layers, flat=True)
    assert got.flat is not None
    assert got.keys.tolist() == step.lens
    for index, layer in enumerate(layers):
        for row, length in enumerate(step.lens):
            first = max(0, length - 1 - layer.sliding_window_size) if layer.sliding_window_size >= 0 else 0
            for head in range(case.heads.q_heads):
                q = data.q[index, row, head].double()
                keys = data.keys[index, row, first:length, head // 2]
                values = data.values[index, row, first:length, head // 2].abs()
                logits = keys @ q * layer.scaling
                if layer.logit_cap:
                    logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
                every = logits if layer.sinks is None else torch.cat([logits, layer.sinks[head].double().view(1)])
                total = torch.exp(every - every.max()).sum()
                p = torch.exp(logits - every.max()) / total
                assert torch.allclose(got.mass[index, row, head], p @ values, rtol=1e-9, atol=0)
                assert torch.allclose(got.flat[index, row, head], values.sum(0) / total, rtol=1e-9, atol=0)
                # Of the longest key there is room for, seen or not: an upper bound.
                longest = data.keys[index, row, :, head // 2].norm(dim=-1).max()
                noise = float(q.norm() * longest * layer.scaling)
                assert float(got.logit_noise[index, row, head]) == pytest.approx(noise, rel=1e-9)


def test_a_window_of_w_keeps_w_keys_and_the_rows_own() -> None:
    schedule = schedule_of(DECODE.format("bf16", ""))
    data = expect(schedule, schedule.steps[0]).data
    layer = make_layers(schedule.case)[0]
    assert windowed(data.visible, data, replace(layer, sliding_window_size=-1)) is data.visible
    for window, counts in ((0, [1, 1, 1]), (4, [1, 5, 5]), (5, [1, 6, 6]), (20, [1, 6, 21])):
        seen = windowed(data.visible, data, replace(layer, sliding_window_size=window))
        assert seen.sum((1, 2)).tolist() == counts


def test_an_answer_is_computed_once_and_does_not_keep_the_data_that_it_was_computed_from() -> None:
    schedule = schedule_of(DECODE.format("bf16", ""))
    first = expect(schedule, schedule.steps[0])
    make_step_data.cache_clear()
    again = expect(schedule, schedule.steps[0])
    assert again.attention is first.attention
    assert again.data is not first.data
    assert torch.equal(again.data.stored_keys, first.data.stored_keys)
