"""A bias among the rows of a step: what is right, computed by hand, its numbers, and how a backend gets it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_testkit.runner_modes.harness import context_for
from attn_testkit.runner_modes.pool_address import pools_anywhere
from attn_testkit.runner_modes.tensors.query_bias import (
    bias_of_rows,
    bias_stride,
    clear_bias,
    fill_bias,
    of_buffer,
    padded_bias,
)

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.features.qq_bias import QQ_BIAS
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import BackendContext, Capabilities, ForwardMode, LayerOptions, Unsupported
from attn_testkit.families.expected import expect
from attn_testkit.families.softmax.attention import attend
from attn_testkit.steps.data import make_layers, make_step_data
from attn_testkit.steps.query_bias import BEHIND_ROWS
from attn_testkit.steps.schedule import make_schedule

DECLARED = TorchNativeBackend.capabilities
CPU = torch.device("cpu")
EXTEND = "extend-gqa2x2-d32-fp32-p4-k19.6-n4a3.4-shuffled-gauss{}-b2prod"
VERIFY = "target-verify-gqa2x2-d32-fp32-p4-k19.6-{}-shuffled-gauss{}-b3prod"
CASES = [
    EXTEND.format("-qqbias"),
    EXTEND.format("-w2-qqbias-cap1.5-sink"),
    EXTEND.format("-qqbiasshared-cap1.5"),
    VERIFY.format("t0.0.1", "-qqbias-cap1.5-sink"),
    VERIFY.format("chain4", "-w2-qqbiasshared"),
]


def case_of(text: str) -> Case:
    return parse_case(text)


def context(case: Case) -> BackendContext:
    with pools_anywhere():
        return context_for([make_schedule(case)], CPU, make_layers(case))


@pytest.mark.parametrize("case_id", CASES)
def test_the_bias_is_added_to_capped_logits_of_rows_of_the_step(case_id: str) -> None:
    case = case_of(case_id)
    schedule = make_schedule(case)
    found = expect(schedule, schedule.steps[0])
    data = found.data
    assert data.qq_bias is not None
    for place, layer in enumerate(make_layers(case)):
        for row, request in enumerate(data.row_request.tolist()):
            offset = int(data.row_offset[row])
            prefix = int(data.row_key[row]) - offset
            seen = data.visible[request, offset].clone()
            if layer.sliding_window_size >= 0:
                seen &= data.key_positions[request] >= data.positions[row] - layer.sliding_window_size
            for head in range(layer.tp_q_head_num):
                keys = data.keys[place][request, :, head // layer.q_per_kv]
                logits = keys @ data.q[place, row, head].double() * layer.scaling
                if layer.logit_cap:
                    logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
                for key in seen.nonzero()[:, 0].tolist():
                    if key >= prefix:
                        logits[key] += data.qq_bias[0, row, key - prefix].double()
                logits = logits.masked_fill(~seen, -torch.inf)
                if layer.sinks is not None:
                    logits = torch.cat([logits, layer.sinks[head : head + 1].double()])
                weights = torch.softmax(logits, 0)[: len(seen)]
                want = weights @ data.values[place][request, :, head // layer.q_per_kv]
                assert torch.allclose(found.attention[place, row, head], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case_id", CASES)
def test_numbers_are_exact_in_bf16_and_hide_exactly_what_a_row_does_not_see(case_id: str) -> None:
    schedule = make_schedule(case_of(case_id))
    for step in schedule.steps[:3]:
        data = make_step_data(schedule, step)
        assert data.qq_bias is not None
        assert torch.equal(data.qq_bias.bfloat16().float(), data.qq_bias)
        for row, request in enumerate(data.row_request.tolist()):
            asked = step.requests[request]
            own = data.qq_bias[0, row]
            seen = data.visible[request, data.row_offset[row], asked.prefix : asked.prefix + asked.new]
            assert torch.equal(own[: asked.new] > -torch.inf, seen)
            assert own[: asked.new][seen].abs().max() <= 4
            assert (own[asked.new :] == BEHIND_ROWS).all()


def test_a_shared_bias_has_the_same_numbers_in_all_requests_and_an_own_one_has_others() -> None:
    for word, alike in (("qqbias", False), ("qqbiasshared", True)):
        schedule = make_schedule(case_of(VERIFY.format("chain4", f"-{word}")))
        data = make_step_data(schedule, schedule.steps[0])
        assert data.qq_bias is not None
        assert torch.equal(data.qq_bias[0, :4], data.qq_bias[0, 4:8]) == alike


def test_all_other_numbers_of_a_case_are_drawn_apart_from_the_bias() -> None:
    case = case_of(CASES[0])
    schedule = make_schedule(case)
    data = make_step_data(schedule, schedule.steps[0])
    assert data.qq_bias is not None
    bare = replace(data, qq_bias=None)
    noise, without = (attend(each, make_layers(case)).logit_noise for each in (data, bare))
    finite = data.qq_bias[0].masked_fill(data.qq_bias[0] == -torch.inf, 0.0)
    for row, request in enumerate(data.row_request.tolist()):
        count = schedule.steps[0].requests[request].new
        want = finite[row, :count].abs().max().double().expand(without[:, row].shape)
        assert torch.allclose(noise[:, row] - without[:, row], want)


def test_some_requests_of_a_step_keep_their_bias() -> None:
    schedule = make_schedule(case_of(CASES[0]))
    step = schedule.steps[0]
    whole = make_step_data(schedule, step)
    part = replace(step, requests=step.requests[1:], part_of=(step, (1,)))
    own = make_step_data(schedule, part)
    assert whole.qq_bias is not None
    assert own.qq_bias is not None
    assert torch.equal(own.qq_bias[0], whole.qq_bias[0, whole.row_request == 1])
    attention = attend(own, make_layers(schedule.case)).out
    assert torch.allclose(attention, attend(whole, make_layers(schedule.case)).out[:, whole.row_request == 1])


def test_a_backend_gets_a_view_with_a_stride_and_nan_behind_its_columns() -> None:
    case = case_of(CASES[0])
    schedule = make_schedule(case)
    data, given = make_step_data(schedule, schedule.steps[0]), context(case)
    assert given.qq_bias == "own"
    buffer = padded_bias(given, case, data)
    assert buffer is not None
    bias = of_buffer(buffer)
    assert bias.shape == (7, given.max_extend_tokens)
    assert bias.stride(0) == bias_stride(given, case) > bias.shape[1]
    assert not bias.isnan().any()
    assert buffer[:, bias.shape[1] :].isnan().all()
    assert data.qq_bias is not None
    columns = data.qq_bias.shape[2]
    assert torch.equal(bias[:, :columns], data.qq_bias[0])
    assert (bias[:, columns:] == BEHIND_ROWS).all()


def test_padded_rows_keep_an_earlier_bias_and_a_capture_has_zeros() -> None:
    case = case_of(VERIFY.format("chain4", "-qqbias"))
    schedule = make_schedule(case)
    data, given = make_step_data(schedule, schedule.steps[0]), context(case)
    stride = bias_stride(given, case)
    buffer = torch.full((12, stride), 7.0)
    clear_bias(buffer.numpy())
    view = bias_of_rows(given, case, buffer.view(-1), 12)
    assert view is not None
    assert view.shape == (12, 4)
    assert (view == 0).all()
    view[8:] = 5.0
    fill_bias(buffer.numpy(), data)
    assert data.qq_bias is not None
    assert torch.equal(view[:8], data.qq_bias[0])
    assert (view[8:] == 5).all()


def test_without_a_bias_no_batch_has_one() -> None:
    case = case_of(EXTEND.format(""))
    schedule = make_schedule(case)
    data, given = make_step_data(schedule, schedule.steps[0]), context(case)
    assert data.qq_bias is None
    assert given.qq_bias == "none"
    assert bias_stride(given, case) == 0
    assert padded_bias(given, case, data) is None
    assert bias_of_rows(given, case, torch.zeros(0), 7) is None


@pytest.mark.parametrize(
    ("case_id", "why"),
    [
        ("decode-gqa2x2-d32-fp32-p4-k19.6-shuffled-gauss-qqbias-b2prod", "prompts or drafts"),
        (EXTEND.format("-qqbias-lsewhole"), "KV splits"),
        (EXTEND.format("-qqbias").replace("gauss", "plus_minus_one"), "count keys"),
        (VERIFY.format("t0.0.1", "-qqbiasshared"), "trees of requests differ"),
        (EXTEND.format("-qqbias") + "-noncausal", "hides the rows"),
    ],
)
def test_a_bias_is_not_tried_where_no_server_has_one(case_id: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(case_id)


def test_a_backend_refuses_an_undeclared_bias_and_one_for_each_request_if_it_takes_one_for_all() -> None:
    class Without(TorchNativeBackend):
        capabilities = DECLARED.with_changes(options={"qq_bias": {"extend"}})

    class Shared(TorchNativeBackend):
        capabilities = DECLARED.with_changes(options={"shared_qq_bias": True})

    own, shared = (context(case_of(VERIFY.format("chain4", word))) for word in ("-qqbias", "-qqbiasshared"))
    with pytest.raises(Unsupported, match="an additive bias in target-verify is not declared"):
        Without(shared)
    with pytest.raises(Unsupported, match="an additive bias for each request: own"):
        Shared(own)
    Shared(shared)
    TorchNativeBackend(own)


def test_a_bias_is_declared_for_prompts_and_drafts_and_a_shared_one_with_its_modes() -> None:
    with pytest.raises(ValueError, match=r"LayerOptions.qq_bias may hold only extend and target-verify, got decode"):
        Capabilities(eager={"decode"}, options=LayerOptions(qq_bias={"decode"}))
    with pytest.raises(ValueError, match="shared_qq_bias without qq_bias"):
        Capabilities(eager={"decode"}, options=LayerOptions(shared_qq_bias=True))


def test_undeclared_contexts_have_a_bias_that_is_not_declared() -> None:
    ask = QQ_BIAS.undeclared[0]  # type: ignore[index]
    verify = context(case_of(VERIFY.format("chain4", "")))
    assert ask(DECLARED.with_changes(options={"qq_bias": ()}), verify) is not None
    assert ask(DECLARED, verify) is None
    asked = ask(DECLARED.with_changes(options={"qq_bias": {"extend"}}), verify)
    assert asked is not None
    assert (asked[0], asked[1].qq_bias) == ("an additive bias", "shared")
    asked = ask(DECLARED.with_changes(options={"shared_qq_bias": True}), verify)
    assert asked is not None
    assert (asked[0], asked[1].qq_bias) == ("an additive bias for each request", "own")


def test_a_case_of_a_bias_for_each_request_is_not_declared_by_a_backend_that_takes_one_for_all() -> None:
    shared = DECLARED.with_changes(options={"shared_qq_bias": True})
    own, same = case_of(CASES[0]), case_of(CASES[2])
    assert (not_declared(DECLARED, own), not_declared(DECLARED, same), not_declared(shared, same)) == ("", "", "")
    assert not_declared(shared, own) == "additive bias for each request"
    assert not_declared(DECLARED.with_changes(options={"qq_bias": {"target-verify"}}), same) == "additive bias"


def test_each_declared_mode_has_a_bias_with_and_without_a_window_sinks_and_branches() -> None:
    for mode in ForwardMode:
        found = [case for case in generate(DECLARED, mode, "core") if case.qq_bias != "none"]
        assert bool(found) is (mode in DECLARED.options.qq_bias)
        for has in (lambda case: case.window >= 0, lambda case: case.sinks, lambda case: case.logit_cap > 0):
            assert {has(case) for case in found} == ({False, True} if found else set())
        assert {case.topk > 1 for case in found} == (
            {False, True} if mode is ForwardMode.TARGET_VERIFY else {False} if found else set()
        )
