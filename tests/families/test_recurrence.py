"""The recurrence and its limits, against formulas written down once more, and the numbers that it is asked about."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.families.recurrent.data import StateStepData, make_state_data, state_layers, state_table
from attn_testkit.families.recurrent.family import RECURRENT
from attn_testkit.families.recurrent.recurrence import convolved, gates_of_rows, recur
from attn_testkit.families.table import family_of
from attn_testkit.steps.schedule import make_schedule, only

CASE = "extend-{kind}-d32-{dtype}-p16-k0.17.5-n6a1.4.9-shuffled-{data}-k16w{width}s{state}{more}-b3prod"
KINDS = ["gdn2x2", "kda2x2", "mamba2x2", "lightning2", "rwkv2"]


def case_id(
    kind: str = "gdn2x2", dtype: str = "bf16", data: str = "mild_decay", state: str = "32", more: str = ""
) -> str:
    return CASE.format(kind=kind, dtype=dtype, data=data, state=state, more=more, width=1 if kind[0] in "lr" else 4)


def data_of(name: str) -> StateStepData:
    schedule = make_schedule(parse_case(name))
    return make_state_data(schedule, schedule.steps[0])


def softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    # Values of strong_decay are beyond the range of fp16, and the exponential of one is beyond that of float64.
    return np.exp(-np.logaddexp(0, -x))


def by_hand(data: StateStepData, layer_index: int, request: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [rows, Hv, V] and state [Hv, V, K] of one request: loops over tokens and heads, in numpy."""
    layer = data.layers[layer_index]
    rows = (data.row_request == request).nonzero().flatten().tolist()
    inputs = [data.windows[layer_index, request].double().numpy()[:, i] for i in range(data.windows.shape[-1])]
    state = data.states[layer_index, request].double().numpy().copy()
    keys, values, found = layer.k_heads * layer.k_dim, layer.v_heads * layer.v_dim, []
    for row in rows:
        x = data.q[layer_index, row].double().numpy()
        inputs.append(x)
        if layer.conv_weight is not None:
            weight = layer.conv_weight.double().numpy()
            x = sum(weight[:, tap] * inputs[len(inputs) - weight.shape[1] + tap] for tap in range(weight.shape[1]))
            x = x if layer.conv_bias is None else x + layer.conv_bias.double().numpy()
            x = x * sigmoid(x) if layer.activation == "silu" else x
        out = np.zeros((layer.v_heads, layer.v_dim))
        for head in range(layer.v_heads):
            group = head // (layer.v_heads // layer.k_heads)
            own = slice(group * layer.k_dim, (group + 1) * layer.k_dim)
            if layer.kind == "mamba":
                v, k, q = x[:values], x[values : values + keys], x[values + keys :]
            else:
                q, k, v = x[:keys], x[keys : 2 * keys], x[2 * keys :]
            q, k, v = q[own], k[own], v[head * layer.v_dim : (head + 1) * layer.v_dim]
            s = state[head]
            if layer.kind == "lightning":
                s = math.exp(-float(layer.slope[head])) * s + np.outer(v, k)
                out[head] = s @ q
            elif layer.kind == "rwkv":
                channels = slice(head * layer.k_dim, (head + 1) * layer.k_dim)
                w = np.exp(-math.exp(-0.5) / (1 + np.exp(-data.k[layer_index, row].double().numpy()[channels])))
                eta = 1 / (1 + np.exp(-data.v[layer_index, row].double().numpy()[channels]))
                kappa = k * layer.k_k.double().numpy()[head]
                kappa = kappa / math.sqrt(float(kappa @ kappa))
                added = k * (1 + (eta - 1) * layer.k_a.double().numpy()[head])
                s = s @ (np.diag(w) - np.outer(kappa, eta * kappa)) + np.outer(v, added)
                out[head] = s @ q
            elif layer.kind == "mamba":
                dt = softplus(float(data.k[layer_index, row, head]) + float(layer.dt_bias[head]))
                s = math.exp(-math.exp(float(layer.A_log[head])) * dt) * s + dt * np.outer(v, k)
                out[head] = s @ q + float(layer.D[head]) * v
            else:
                wide = layer.k_dim if layer.kind == "kda" else 1
                a = data.k[layer_index, row].double().numpy()[head * wide : (head + 1) * wide]
                a = a + layer.dt_bias.double().numpy().reshape(layer.v_heads, wide)[head]
                rate = math.exp(float(layer.A_log[head]))
                if layer.lower_bound is not None:
                    g = layer.lower_bound / (1 + np.exp(-rate * a))
                else:
                    g = np.array([-rate * softplus(each) for each in a])
                beta = 1 / (1 + math.exp(-float(data.v[layer_index, row, head])))
                q, k = (each / math.sqrt(float(each @ each) + 1e-6) for each in (q, k))
                s = s * np.exp(g)
                s = s + beta * np.outer(v - s @ k, k)
                out[head] = s @ q / math.sqrt(layer.k_dim)
            state[head] = s
        found.append(out)
    return np.array(found), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data", ["mild_decay", "weak_decay", "strong_decay", "unit_keys", "exact_gates", "near_epsilon"]
)
def test_outputs_and_states_are_those_of_the_formulas(kind: str, data: str) -> None:
    if (data == "near_epsilon" and kind[:3] not in ("gdn", "kda")) or (kind, data) == ("lightning2", "exact_gates"):
        pytest.skip("a layer of this kind refuses the data")
    step = data_of(case_id(kind, data=data))
    found = recur(step)
    for layer in range(len(step.layers)):
        for request in range(3):
            out, state = by_hand(step, layer, request)
            rows = step.row_request == request
            assert np.allclose(found.out[layer, rows], out, rtol=1e-12, atol=1e-12)
            assert np.allclose(found.states[layer, request], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_windows_are_the_last_inputs_and_short_prompts_keep_older_ones(kind: str) -> None:
    step = data_of(case_id(kind))
    windows = recur(step).windows
    first = 0
    for request, new in enumerate(step.news):
        rows = step.q[:, first : first + new].transpose(1, 2)
        kept = min(new, 3)
        assert torch.equal(windows[:, request, :, 3 - kept :], rows[..., new - kept :])
        assert torch.equal(windows[:, request, :, : 3 - kept], step.windows[:, request, :, kept:])
        first += new
    assert windows.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("data", "low", "high"),
    [("mild_decay", 0.39, 0.81), ("weak_decay", 0.997, 0.999), ("no_decay", 1, 1), ("strong_decay", 0, 0)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_decay_of_a_pattern_is_what_its_name_says(kind: str, data: str, low: float, high: float) -> None:
    """A state is asked for, which a token multiplies by the decay: the token's own value is 0."""
    step = data_of(case_id(kind, dtype="fp32", data=data))
    for layer_index, layer in enumerate(step.layers):
        if layer.lower_bound is not None:
            # Its decay is at least exp(-5) by definition.
            low, high = max(low, math.exp(-5.0)), max(high, 0.9)
        if layer.slope is not None:
            decay = np.exp(-layer.slope.double().numpy())
        elif layer.kind == "rwkv":
            # Its decay is at least 0.545 by definition.
            low, high = max(low, 0.545), max(high, 0.546)
            decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(step.k[layer_index].double())).numpy()
        elif layer.kind == "mamba":
            gate = step.k[layer_index].double() + layer.dt_bias.double()
            decay = torch.exp(-layer.A_log.double().exp() * torch.nn.functional.softplus(gate)).numpy()
        else:
            gate = step.k[layer_index].double().unflatten(-1, (2 * layer.k_heads, -1))
            gate = gate + layer.dt_bias.double().view(2 * layer.k_heads, -1)
            rate = layer.A_log.double().exp()[:, None]
            g = -rate * torch.nn.functional.softplus(gate)
            if layer.lower_bound is not None:
                g = layer.lower_bound * torch.sigmoid(rate * gate)
            decay = g.exp().numpy()
        assert decay.min() >= low - 1e-9
        assert decay.max() <= high + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_exact_data_puts_values_of_tokens_into_columns(kind: str) -> None:
    step = data_of(case_id(kind, data="unit_keys"))
    found, keys = recur(step), step.unit_keys
    assert keys is not None
    layer = step.layers[0]
    last = int((step.row_request == 2).nonzero().flatten()[-1])
    mixed = step.q[0, last].double()
    first = 0 if kind[0] == "m" else 2 * layer.k_heads * layer.k_dim
    value, column = mixed[first : first + layer.v_dim], found.states[0, 2, 0, :, int(keys[0, last, 0])]
    if kind[:1] in "gkr":
        assert float((column - value).abs().max()) < 1e-3, "the last token overwrites its column"
    else:
        factor = 32.0 if kind[0] == "m" else 1.0
        before = column - factor * value
        assert torch.equal(before, before.round()), "the last token is one term of a sum of integers"
    assert float((found.states - found.states.round()).abs().max()) < 1e-3


GATES = "extend-{}-d32-{}-p16-k9.30.0-n84a140.70.40-shuffled-exact_gates-k32w4s32-b3prod"
ENDS_AND_STARTS = {15, 16, 31, 32, 63, 64, 127, 128}


@pytest.mark.parametrize(("kind", "dtype"), [("gdn4x2", "fp16"), ("kda4x2", "bf16"), ("mamba4x2", "bf16")])
def test_each_head_has_one_row_whose_decay_is_0_or_a_half_and_the_others_are_exactly_1(kind: str, dtype: str) -> None:
    step, rows = data_of(GATES.format(kind, dtype)), set[tuple[int, bool]]()
    for index, layer in enumerate(step.layers):
        decays = gates_of_rows(layer, index, step)[0]
        for request in range(3):
            own = decays[step.row_request == request]
            assert ((own < 0.9).sum(0) == 1).all()
            assert (own[own > 0.9].float() == 1).all()
            rows |= {
                (row, float(own[row, head, channel]) < 0.1) for row, head, channel in (own < 0.9).nonzero().tolist()
            }
    assert {row for row, _ in rows} > ENDS_AND_STARTS, "ends and starts of chunks, and rows inside of them"
    assert rows >= {(row, forgets) for row in ENDS_AND_STARTS for forgets in (True, False)}


@pytest.mark.parametrize(
    ("kind", "dtype", "why"), [("lightning4", "bf16", "one decay"), ("mamba4x2", "fp16", "do not both fit in fp16")]
)
def test_layers_without_exact_gates_refuse_them(kind: str, dtype: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(GATES.format(kind, dtype).replace("w4", "w1" if kind[0] == "l" else "w4"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", ["32", "b16", "16"])
def test_a_kernel_in_float32_is_within_the_limit_and_one_that_is_off_by_it_is_not(kind: str, state: str) -> None:
    step = data_of(case_id(kind, state=state))
    found = recur(step)
    rounded = found.states.to(step.states.dtype).double()
    off = torch.linalg.vector_norm(rounded - found.states, dim=-1) / found.state_limit
    assert float(off.max()) < 1
    size = torch.linalg.vector_norm(found.states, dim=-1)
    part = found.state_limit / size.clamp(min=1e-3)
    # bf16 activations are rounded by the convolution of a server; a state may not be off by a whole percent or two.
    assert float(part.median()) < 0.05
    assert float(part.median()) > {"32": 1e-6, "b16": 4e-3, "16": 5e-4}[state]


def test_coarser_products_and_activations_have_wider_limits() -> None:
    step = data_of(case_id("gdn2x2", dtype="fp32"))
    narrow, wide = recur(step), recur(replace(step, products="model", dtype="bf16"))
    assert float((wide.state_limit / narrow.state_limit).min()) > 50
    assert bool((wide.out_limit > narrow.out_limit).all())
    in_tf32 = recur(replace(step, products="tf32"))
    assert bool((in_tf32.state_limit > narrow.state_limit).all())


def test_the_limit_does_not_grow_like_a_sum_over_tokens() -> None:
    name = "extend-gdn2x2-d32-fp32-p16-k9-n{0}a{0}-shuffled-mild_decay-k16w4s32-b1prod"
    few, many = (recur(data_of(name.format(new))) for new in (20, 160))
    assert float(many.state_limit.mean()) < 1.5 * float(few.state_limit.mean())


def test_a_part_of_a_step_has_the_numbers_of_the_whole() -> None:
    schedule = make_schedule(parse_case(case_id()))
    whole, step = make_state_data(schedule, schedule.steps[0]), only(schedule.steps[0], 1)
    one, rows = make_state_data(schedule, step), whole.row_request == 1
    assert torch.equal(one.q, whole.q[:, rows])
    assert torch.equal(one.states[:, 0], whole.states[:, 1])
    assert one.slots.tolist() == [whole.slots.tolist()[1]]


def test_requests_layers_and_steps_have_different_numbers() -> None:
    schedule = make_schedule(parse_case(case_id()))
    one, other = (make_state_data(schedule, step) for step in schedule.steps[:2])
    assert not torch.equal(one.states[:, 1], one.states[:, 2])
    assert not torch.equal(one.states[0], one.states[1])
    assert not torch.equal(one.q[0, 0], other.q[0, 0])


def test_fresh_requests_are_those_without_a_token_before_the_step() -> None:
    step = data_of(case_id())
    assert step.fresh.tolist() == [True, False, False]
    assert not step.states[:, 0].any()
    assert not step.windows[:, 0].any()


@pytest.mark.parametrize("name", [case_id(), "decode-gdn2x2-d32-bf16-p16-k3.9.1.4-shuffled-mild_decay-k16w4s32-b5prod"])
def test_a_slot_is_neither_the_row_nor_the_place_of_its_request(name: str) -> None:
    schedule = make_schedule(parse_case(name))
    for step in schedule.steps:
        table = state_table(schedule, step)
        slots = table[[request.pool_row for request in step.requests], 0]
        assert not table[0].any()
        assert len(set(slots.tolist())) == step.bs
        assert 0 not in slots
        for place, request in enumerate(step.requests):
            assert slots[place] not in (place, request.pool_row)


def test_layers_differ_and_only_some_have_a_bias() -> None:
    layers = state_layers(parse_case(case_id().replace("-b3prod", "-layers3from5-b3prod")))
    assert [layer.layer_id for layer in layers] == [5, 6, 7]
    assert [layer.conv_bias is None for layer in layers] == [False, True, False]
    assert not torch.equal(layers[0].A_log, layers[1].A_log)  # type: ignore[arg-type]
    assert family_of(parse_case(case_id())) is RECURRENT


@pytest.mark.parametrize("kind", ["gdn2x2", "lightning2", "rwkv2"])
def test_an_idle_step_has_no_rows(kind: str) -> None:
    schedule = make_schedule(parse_case(case_id(kind)))
    step = replace(schedule.steps[0], requests=(), name="idle")
    data = make_state_data(schedule, step)
    assert data.q.shape[1] == data.states.shape[1] == 0
    assert recur(data).out.shape[1] == 0


def test_after_a_verify_the_state_is_that_of_the_accepted_nodes_and_outputs_are_those_of_all() -> None:
    name = "target-verify-gdn2x2-d32-bf16-p16-k7.17.5.2-chain4-shuffled-mild_decay-k16w4s32-b4prod"
    schedule, step = make_schedule(parse_case(name)), data_of(name)
    tried = {kept for each in schedule.steps for kept in make_state_data(schedule, each).kept}
    assert tried == {1, 2, 3, 4}, "every count of accepted nodes is tried; the root is always accepted"
    found, whole = recur(step), recur(replace(step, kept=step.news))
    assert torch.equal(found.out, whole.out)
    for request, kept in enumerate(step.kept):
        rows = (step.row_request == request).nonzero().flatten()[:kept]
        tensors = {name: getattr(step, name)[:, rows] for name in "qkv"}
        alone = replace(
            step, **tensors, news=(kept,), kept=(kept,), ends=(replace(step.ends[request], request=0),),
            states=step.states[:, request : request + 1], windows=step.windows[:, request : request + 1],
        )  # fmt: skip
        # A product of other sizes may round the last bit of a float64 another way.
        for name in ("states", "state_limit"):
            one, whole_batch = getattr(recur(alone), name)[:, 0], getattr(found, name)[:, request]
            assert torch.allclose(one, whole_batch, rtol=1e-12, atol=1e-15)
        assert torch.equal(recur(alone).windows[:, 0], found.windows[:, request])


def test_rounded_products_of_a_convolution_are_within_the_limit_of_who_declares_them_and_of_nobody_else() -> None:
    """A convolution as ``acc += x * w`` in bf16 gives it (SGLang's ``causal_conv1d_update``)."""
    exact = data_of("decode-gdn2x2-d32-bf16-p16-k9x20-shuffled-mild_decay-k16w4s32-b20prod")
    declared, layer, off = replace(exact, conv_products="model"), exact.layers[0], []
    assert layer.conv_weight is not None
    inputs = torch.cat([exact.windows[0], exact.q[0][..., None]], -1)
    rounded = (inputs * layer.conv_weight).double().sum(-1)
    right = (inputs.double() * layer.conv_weight.double()).sum(-1)
    if layer.conv_bias is not None:
        rounded, right = (each + layer.conv_bias.double() for each in (rounded, right))
    for data in (exact, declared):
        want, limit = convolved(layer, 0, data)
        # The output is rounded once more in either case.
        got = torch.nn.functional.silu(rounded).to(torch.bfloat16).double()
        off.append(float(((got - want).abs() / limit).max()))
    assert not torch.equal(rounded, right)
    assert off[0] > 1 > off[1]


_SMALL_VALUES = "decode-kda2x2-d64-fp16-p16-k0.33.0.4-shuffled-mild_decay-k64w4s32.slot0-layers3from5-b4nan"


def as_kernels_convolve(data: StateStepData, layer_index: int, rounds_to: torch.dtype) -> torch.Tensor:
    """Rows of one decode after a convolution whose results are rounded to a dtype, float64."""
    layer = data.layers[layer_index]
    assert layer.conv_weight is not None
    inputs = torch.cat([data.windows[layer_index], data.q[layer_index][..., None]], -1).double()
    found = (inputs * layer.conv_weight.double()).sum(-1)
    found = found if layer.conv_bias is None else found + layer.conv_bias.double()
    return torch.nn.functional.silu(found).to(rounds_to).double()


def test_activations_below_the_smallest_normal_number_of_fp16_round_by_half_a_spacing() -> None:
    """Their errors do not shrink with them: a state of 4e-7 was off by 3.9 limits on an H100."""
    data, flushed = data_of(_SMALL_VALUES), []
    for layer in range(3):
        want, limit = convolved(data.layers[layer], layer, data)
        got, small = as_kernels_convolve(data, layer, torch.float16), want.abs() < 2.0**-14
        assert bool(((got - want).abs() <= limit).all())
        assert bool((limit[small] <= 2.0**-25 + 1e-6 * want.abs()[small] + 1e-9).all()), "no more than half a spacing"
        flushed.append(((got.masked_fill(small, 0.0) - want).abs() > limit).any())
    assert any(flushed), "a kernel that flushes subnormal numbers is over the limit"


def test_subnormal_factors_of_products_are_allowed_for_who_rounds_them_only() -> None:
    """A state that is small itself: what a chunked kernel in fp16 reads of it is rounded by half a spacing."""
    data = data_of(case_id("lightning2", dtype="fp16", data="mild_decay"))
    small = replace(data, q=data.q * 2.0**-12, states=data.states * 2.0**-24)
    exact, rounds = recur(small), recur(replace(small, products="model"))
    k_dim = data.shape.k_dim
    state = small.states[0].double()
    moved = torch.linalg.vector_norm(state.half().double() - state, dim=-1).max()
    assert float(moved) > float((exact.state_limit[0] / 2).max()), "half of the limit is what may round"
    assert float(moved) < 2.0**-25 * k_dim**0.5
    assert bool((rounds.state_limit > exact.state_limit).all())
