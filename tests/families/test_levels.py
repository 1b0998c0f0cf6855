"""Log-linear attention: its answers against the masks of the paper, filled levels, and mistakes that have a name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_testkit.backends.torch_native_state_levels import TorchNativeStateLevelsBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.minimal import drawn_case
from attn_testkit.contract import ForwardMode
from attn_testkit.families.recurrent.data import StateStepData, make_state_data
from attn_testkit.families.recurrent.level_mistakes import LEVEL_SLIPS, mistaken_levels
from attn_testkit.families.recurrent.levels import Token, filled_levels, step_of_levels
from attn_testkit.families.recurrent.recurrence import convolved, gates_of_rows, recur
from attn_testkit.steps.schedule import make_schedule

CASE = "extend-loglinear2x2-d32-fp32-p16-k0.6.37-n23a23.9.3-shuffled-{}-k16w4s32-layers1from0-b3prod"
VERIFY = "target-verify-loglinear2x2-d32-bf16-p16-k2.3.1.5-chain4-shuffled-mild_decay-k16w4s32-layers1from0-b4prod"


def data_of(name: str) -> StateStepData:
    schedule = make_schedule(parse_case(name))
    return make_state_data(schedule, schedule.steps[0])


def matrix_of_levels(tokens: int, weights: torch.Tensor) -> torch.Tensor:
    """[Hv, T, T]: weight with which a token reads an earlier one, by the masks of ``construct_level_mask`` of
    flash-linear-attention. ``weights`` [T, Hv, n + 1]."""
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    found = torch.diag_embed(weights[..., 0].T)
    for level in range(1, weights.shape[-1]):
        half = 1 << (level - 1)
        start = row - row % half
        mask = (row % (2 * half) >= half) & (column + half >= start) & (column < start)
        found = found + mask * weights[..., level].T[..., None]
    return found


@pytest.mark.parametrize("data", ["mild_decay", "weak_decay", "unit_keys", "exact_gates"])
def test_a_fresh_prompt_has_the_outputs_of_the_papers_masks_and_states_that_are_sums_of_its_tokens(data: str) -> None:
    step = data_of(CASE.format(data))
    layer, found, tokens = step.layers[0], recur(step), step.news[0]
    assert layer.level_weights is not None
    rows, values = convolved(layer, 0, step)[0][:tokens], layer.v_heads * layer.v_dim
    v = rows[:, :values].view(tokens, layer.v_heads, layer.v_dim)
    k, q = (each.reshape(tokens, 2, 16).repeat_interleave(2, 1) for each in rows[:, values:].chunk(2, -1))
    decay, _, size = (each[:tokens] for each in gates_of_rows(layer, 0, step))
    scaled = layer.level_weights.double() * step.v[0, :tokens].double().view(tokens, *layer.level_weights.shape)
    weights = torch.nn.functional.softplus(scaled)
    # Products of the decays of the tokens s + 1 .. t, for s up to t.
    later = torch.stack([
        torch.stack([decay[s + 1 : t + 1, :, 0].prod(0) if s <= t else torch.zeros(4, dtype=torch.float64)
                     for s in range(tokens)], -1)
        for t in range(tokens)
    ], 1)  # fmt: skip
    read = torch.einsum("thk,shk->hts", q, k) * later * matrix_of_levels(tokens, weights)
    assert layer.D is not None
    out = torch.einsum("hts,shv->thv", read, size * v) + layer.D.double()[:, None] * v
    assert torch.allclose(found.out[0, :tokens], out, rtol=1e-11, atol=1e-11)
    states, last = found.states[0, 0].unflatten(0, (layer.levels, 4)), 0
    for level in reversed(range(layer.levels)):
        count = 1 << level if tokens >> level & 1 else 0
        own = slice(last, last + count)
        kept = later[:, tokens - 1, own].T[..., None] * size[own] * v[own]
        want = torch.einsum("thv,thk->hvk", kept, k[own])
        assert torch.allclose(states[level], want, rtol=1e-11, atol=1e-11)
        last += count
    assert last == tokens


def test_after_a_verify_the_levels_are_those_of_the_accepted_tokens_and_of_no_rejected_one() -> None:
    schedule = make_schedule(parse_case(VERIFY))
    seen = set[int]()
    for step in [each for each in schedule.steps if each.requests]:
        data = make_state_data(schedule, step)
        levels = data.layers[0].levels
        filled = recur(data).states[0].unflatten(1, (levels, -1)).flatten(2).any(-1)
        for end, request, kept in zip(data.ends, step.requests, data.kept, strict=True):
            assert filled[end.request].tolist() == filled_levels(request.prefix + kept, levels).tolist()
            seen.add(kept)
    assert len(seen) > 2, "different numbers of accepted nodes"


def test_empty_levels_hold_zeros_before_a_step_and_full_ones_do_not() -> None:
    data = data_of(CASE.format("mild_decay"))
    filled = data.states[0].unflatten(1, (data.layers[0].levels, -1)).flatten(2).any(-1)
    for request, prefix in enumerate((0, 6, 37)):
        assert filled[request].nonzero().flatten().tolist() == [bit for bit in range(8) if prefix >> bit & 1]


@pytest.mark.parametrize("slip", LEVEL_SLIPS)
def test_each_mistake_changes_outputs_or_states_by_many_limits(slip: str) -> None:
    data = data_of(CASE.format("mild_decay"))
    mistaken: dict[str, StateStepData] = {each.level_slip: each for _, each in mistaken_levels(data)}
    right, wrong = recur(data), recur(mistaken[slip])
    out = ((wrong.out - right.out).abs() / right.out_limit).max()
    states = (torch.linalg.vector_norm(wrong.states - right.states, dim=-1) / right.state_limit).max()
    assert float(out) > 20
    assert slip.startswith("weight") or float(states) > 20


def test_a_mistake_has_no_data_for_other_kinds() -> None:
    other = data_of(CASE.format("mild_decay").replace("loglinear", "mamba"))
    assert list(mistaken_levels(other)) == []


@pytest.mark.parametrize("state", ["32", "b16"])
def test_a_kernel_in_float32_is_within_the_limit_which_is_far_below_the_states(state: str) -> None:
    step = data_of(CASE.format("mild_decay").replace("s32", f"s{state}").replace("fp32", "bf16"))
    found = recur(step)
    off = torch.linalg.vector_norm(found.states.to(step.states.dtype).double() - found.states, dim=-1)
    assert bool((off <= found.state_limit).all())
    filled = found.states.flatten(3).any(-1)
    size = torch.linalg.vector_norm(found.states, dim=-1)
    part = (found.state_limit / size)[filled]
    assert {"32": 1e-6, "b16": 4e-3}[state] < float(part.median()) < 0.05
    # An empty level has to be zero.
    assert float(found.state_limit[~filled].max()) < 1e-30


@pytest.mark.parametrize("data", ["weak_decay", "no_decay"])
def test_float32_is_within_the_limits_after_many_merges_and_not_far_below_them(data: str) -> None:
    """Limits without the errors of merged levels, or without those of decays, are too narrow for it."""
    # Without a convolution, whose errors are larger.
    step = replace(data_of(CASE.format(data).replace("n23a23", "n190a190")), passed_on=True)
    layer, found, tokens = step.layers[0], recur(step), step.news[0]
    rows = convolved(layer, 0, step)[0][:tokens].float()
    kernel = TorchNativeStateLevelsBackend.__new__(TorchNativeStateLevelsBackend)
    state, outs = torch.zeros(1, layer.state_heads, layer.v_dim, layer.k_dim), []
    for token in range(tokens):
        kernel.before, kernel.token, own = torch.tensor([token]), 0, slice(token, token + 1)
        gates = step.k[0, own], step.v[0, own]
        state, read = kernel.step(state, *kernel.split(rows[own], layer), *gates, layer)
        outs.append(read)
    off = torch.linalg.vector_norm(state[0].double() - found.states[0, 0], dim=-1)
    ratios = (off / found.state_limit[0, 0])[found.states[0, 0].flatten(1).any(-1)]
    of_outputs = (torch.cat(outs).double() - found.out[0, :tokens]).abs() / found.out_limit[0, :tokens]
    for each in (ratios, of_outputs):
        assert 0.02 < float(each.max()) < 1


def test_one_rounding_of_a_decay_moves_all_levels_and_what_merges_or_is_read_of_them_by_their_sum() -> None:
    def one(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)

    token = Token(
        own=one(0.0)[..., None], own_off=one(0.0), decay=one(1.0), decay_off=one(1e-6), moved=0.0, q=one(1.0),
        q_off=one(0.0), read_off=0.0, lost=0.0, weights=one(1.0, 1.0, 1.0, 1.0),
        weights_off=one(0.0, 0.0, 0.0, 0.0), tokens=torch.tensor([3]),
    )  # fmt: skip
    states = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1, 1)
    after, walk, read, off = step_of_levels(states, torch.zeros_like(states[..., 0]), token, "")
    assert after.flatten().tolist() == [0, 0, 5]
    assert float(read) == 5
    for each in (walk[0, 0, 2], off):
        assert 5e-6 <= float(each) < 8e-6


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("decode-loglinear2x2-d32-bf16-p16-k5.9-shuffled-mild_decay-k16w4s32.source-b2prod", "levels follow"),
        (
            "decode-loglinear2x2-d32-bf16-p16-k5.9-shuffled-mild_decay-k16w4s32-handed2to4p16hnd-b2prod",
            "several places",
        ),
    ],
)
def test_what_moves_or_shares_parts_of_a_slot_is_refused(word: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(word)


class LastOfEach:
    """Draws the last value of each feature."""

    def one_of(self, values, /):
        return values[-1]

    def number(self, low, high, /):
        return low

    def numbers(self, count, *ranges):
        return (ranges[0][0],) * count[0]


def test_a_decode_that_is_drawn_continues_no_other_slot_whatever_another_kind_may() -> None:
    declared = TorchNativeStateLevelsBackend.capabilities.with_changes(
        heads={"families": {"mamba", "loglinear"}}, state={"continues": {"source"}}
    )
    case = drawn_case(LastOfEach(), declared, ForwardMode.DECODE)
    assert case.state is not None
    assert (case.heads.family, case.state.continues) == ("loglinear", "")
