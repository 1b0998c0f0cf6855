"""New rows as given, against a loop that a reader can check by eye: which number of a token a row attends."""

from __future__ import annotations

import math

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Capabilities, ForwardMode, KVPools, Precision
from attn_testkit.families.expected import expect
from attn_testkit.running.case_runs.case_run import schedule_for
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import Schedule, Step, make_schedule

CASES = [
    "decode-gqa3x2-d32-bf16-p16-k0.5.20-shuffled-gauss-kvfp8e4m3-w4-b3prod",
    "target-verify-gqa2x2-d32-fp16-p1-k5.9-t0.0.1.1.3-shuffled-gauss-kvfp8e4m3-w3-sink-b2prod",
    "draft-extend-mqa4-d32-bf16-p16-k5.9-n4a1.3-reversed-gauss-kvfp8e4m3-b2prod",
    "extend-gqa2x2-d32-bf16-p4-k0.5.9-n4a9.1.2-chunks3-shared-gauss-kvfp8e4m3-b4prod",
    "decode-mla2-d32r32-bf16-p16-k5.9-shuffled-gauss-kvfp8e4m3-b2prod",
    "draft-decode-gqa2x2-d32-bf16-p4-k3.9-topk2steps4-shuffled-gauss-kvfp8e4m3-b2prod",
]


def by_hand(schedule: Schedule, step: Step, as_given: bool) -> torch.Tensor:
    """[L, T, Hq, Dv], one row, one head, one key at a time."""
    case, data = schedule.case, make_step_data(schedule, step)
    out = torch.zeros(2, step.tokens, case.heads.q_heads, case.head_dim, dtype=torch.float64)
    firsts = [sum(r.new for r in step.requests[:b]) for b in range(step.bs)]
    for index, layer in enumerate(make_layers(case)):
        for b, request in enumerate(step.requests):
            for j in range(request.new):
                for head in range(case.heads.q_heads):
                    kv_head, logits, values = head // layer.q_per_kv, [], []
                    for key in range(request.prefix + request.new):
                        behind = int(data.query_positions[b, j] - data.key_positions[b, key])
                        if not data.visible[b, j, key] or (0 <= layer.sliding_window_size < behind):
                            continue
                        node = key - request.prefix
                        of_this_forward = node == j if case.draft else node >= 0
                        if as_given and of_this_forward:
                            k, v = (x[index, firsts[b] + node, kv_head].double() for x in (data.k, data.v))
                        else:
                            k, v = (x[index, b, key, kv_head] for x in (data.keys, data.values))
                        logits.append(float(data.q[index, firsts[b] + j, head].double() @ k) * layer.scaling)
                        values.append(v)
                    weights = [math.exp(x) for x in logits]
                    total = sum(weights) + (math.exp(float(layer.sinks[head])) if layer.sinks is not None else 0.0)
                    for weight, value in zip(weights, values, strict=True):
                        out[index, firsts[b] + j, head] += weight / total * value
    return out


@pytest.mark.parametrize("case_id", CASES)
@pytest.mark.parametrize("as_given", [False, True])
def test_each_row_attends_what_the_capability_says(case_id: str, as_given: bool) -> None:
    schedule = make_schedule(parse_case(case_id), Numerics(new_rows_as_given=as_given))
    step = schedule.steps[1] if schedule.chunks else schedule.steps[0]
    found = expect(schedule, step)
    assert torch.allclose(found.attention, by_hand(schedule, step, as_given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case_id", CASES)
def test_the_two_differ_by_more_than_the_limit_where_new_rows_have_weight(case_id: str) -> None:
    case = parse_case(case_id)
    stored, given = (make_schedule(case, Numerics(new_rows_as_given=capability)) for capability in (False, True))
    one, other = (expect(schedule, schedule.steps[0]) for schedule in (stored, given))
    assert ((one.attention - other.attention).abs() > one.attention_limit + other.attention_limit).any()
    assert torch.equal(one.data.stored_keys.view(torch.uint8), other.data.stored_keys.view(torch.uint8)), "the pool"


def test_where_the_pool_holds_the_new_rows_already_none_are_given() -> None:
    case = next(
        case for seed in range(8) if (case := parse_case(f"{CASES[0]}-s{seed + 1}")).derived("second-step-stored")
    )
    stored, given = (make_schedule(case, Numerics(new_rows_as_given=capability)) for capability in (False, True))
    assert torch.equal(expect(given, given.second).attention, expect(stored, stored.second).attention)
    assert not torch.equal(expect(given, given.steps[0]).attention, expect(stored, stored.steps[0]).attention)


def test_the_capability_is_a_mode_and_asks_for_an_fp8_pool() -> None:
    declared = Capabilities(
        eager={"decode", "extend"},
        kv_pool=KVPools(kv_dtypes={"fp8_e4m3", "same"}),
        precision=Precision(new_rows_as_given={"extend"}),
    )
    extend, decode = parse_case(CASES[3]), parse_case(CASES[0])
    assert schedule_for(extend, declared).new_rows_as_given
    assert schedule_for(decode, declared) is make_schedule(decode)
    plain = parse_case(CASES[3].replace("-kvfp8e4m3", ""))
    assert schedule_for(plain, declared) is make_schedule(plain)
    with pytest.raises(ValueError, match="unknown new_rows_as_given 'extends'; did you mean 'extend'"):
        Capabilities(eager={ForwardMode.DECODE}, precision=Precision(new_rows_as_given={"extends"}))
