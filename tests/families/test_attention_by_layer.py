"""Layers that differ in their heads: what is right, and how far from it rounding may lead, follows each layer."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.expected import Expected, expect
from attn_testkit.families.rounding import linear_limit, row_limit
from attn_testkit.model import make_weights
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

WINDOWED = "decode-gqa2x4-d64-{}-p4-k19.40.6-shuffled-gauss{}-w7-cap1.5-sink-layers3from5by8x4d32.8x2d64-b4prod"
CASES = [
    WINDOWED.format("bf16", ""),
    WINDOWED.format("fp32", ""),
    WINDOWED.format("fp16", "-kvfp8e4m3"),
    WINDOWED.format("bf16", "").replace("by8x4d32.8x2d64", "by4x2d32.8x4d64"),
    WINDOWED.format("bf16", "").replace("by8x4d32.8x2d64", "by8x2d64.4x1d32").replace("gqa2x4", "gqa4x2"),
]
SOME_SINKS = [
    WINDOWED.format("bf16", "").replace("from5by", "from5variedby") + seed for seed in ("", "-s1", "-s2", "-s3", "-s4")
]
"""Sinks in some of three layers only."""


def answer(case: str) -> Expected:
    schedule = make_schedule(parse_case(case))
    return expect(schedule, schedule.steps[0])


def test_sinks_are_in_one_layer_or_two_of_three_and_in_the_first_of_some_cases_only() -> None:
    have = [[layer.sinks is not None for layer in make_layers(parse_case(case))] for case in SOME_SINKS]
    assert {sum(each) for each in have} == {1, 2}
    assert {each[0] for each in have} == {True, False}


@pytest.mark.parametrize("case", [*CASES, *SOME_SINKS])
def test_each_layer_is_attention_with_its_own_heads_dim_and_scale_and_zeros_beside_it(case: str) -> None:
    found, maps = answer(case), parse_case(case).head_maps
    data = found.data
    for place, (layer, each) in enumerate(zip(make_layers(parse_case(case)), maps, strict=True)):
        assert torch.equal(each.q_whole(each.q_part(found.attention[place])), found.attention[place])
        queries, own = each.q_part(data.q[place]).double(), each.q_part(found.attention[place])
        keys, values = each.kv_part(data.keys[place]), each.kv_part(data.values[place])
        for row, request in enumerate(data.row_request.tolist()):
            last = int(data.row_key[row])
            first = max(0, last - layer.sliding_window_size) if layer.sliding_window_size >= 0 else 0
            seen = slice(first, last + 1)
            for head in range(layer.tp_q_head_num):
                kv_head = head // layer.q_per_kv
                logits = keys[request, seen, kv_head] @ queries[row, head] * layer.scaling
                if layer.logit_cap:
                    logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
                if layer.sinks is None:
                    weights = torch.softmax(logits, 0)
                else:
                    weights = torch.softmax(torch.cat([logits, layer.sinks[head : head + 1].double()]), 0)[:-1]
                want = weights @ values[request, seen, kv_head]
                assert torch.allclose(own[row, head], want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_a_model_that_multiplies_each_layers_own(case: str) -> None:
    found, maps = answer(case), parse_case(case).head_maps
    whole = found.attention.shape[2:]
    weights = make_weights(len(maps), whole.numel()).double()
    hidden, allowed = found.data.hidden.double(), torch.zeros(())
    for place, each in enumerate(maps):
        by_head = weights.out[place].view(*whole, -1)
        own = by_head[: each.layer.num_qo_heads, : each.layer.head_dim].flatten(0, 1)
        rows = each.q_part(found.attention[place]).flatten(1)
        hidden = hidden + rows @ own
        allowed = allowed + linear_limit(each.q_part(found.attention_limit[place]).flatten(1), rows, own.abs())
    assert torch.allclose(found.hidden, hidden, rtol=1e-12, atol=1e-12)
    allowed = allowed + 3 * 2.0**-24 * hidden.abs()
    assert torch.allclose(found.hidden_limit, allowed, rtol=1e-12, atol=0), "what a layer lacks adds nothing"


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_a_row_is_that_of_the_numbers_it_has(case: str) -> None:
    found, parsed = answer(case), parse_case(case)
    for place, each in enumerate(parsed.head_maps):
        own = row_limit(each.q_part(found.attention_limit[place]), parsed.dtype)
        assert torch.allclose(found.row_limit[place, :, : each.layer.num_qo_heads], own, rtol=1e-12, atol=0)
    assert (found.attention_limit > 0).all()
    assert (found.row_limit > 0).all(), "nothing is divided by zero"
