"""Tokens that exact data names by outputs: values that a later token of the key has overwritten."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks.state_tokens import read_text
from attn_testkit.families.recurrent.data import StateStepData, make_state_data
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.steps.schedule import make_schedule

CASE = "extend-{}-d32-bf16-p16-k7.0-n90a90.3-shuffled-unit_keys-k16w4s32-b2prod"
LOST = 40
"""A row whose value has been overwritten long before the end."""


def data_of(kind: str) -> StateStepData:
    schedule = make_schedule(parse_case(CASE.format(kind)))
    return make_state_data(schedule, schedule.steps[0])


def run(data: StateStepData, lost: int | None = None, early: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [L, T, Hv, V] and states of request 0 if row ``lost`` is not applied, or ``early`` one row too early."""
    found, states = recur(data).out.clone(), []
    for layer, each in enumerate(data.layers):
        keys, values = each.k_heads * each.k_dim, each.v_heads * each.v_dim
        state = data.states[layer, 0].double().clone()
        rows = data.q[layer, : data.news[0]].double()
        k, v = (
            rows[:, keys : 2 * keys].view(-1, each.k_heads, each.k_dim),
            rows[:, -values:].view(-1, each.v_heads, each.v_dim),
        )
        q = rows[:, :keys].view(-1, each.k_heads, each.k_dim)
        q = q / q.norm(dim=-1, keepdim=True) * each.k_dim**-0.5
        k, q = (part.repeat_interleave(each.v_heads // each.k_heads, 1) for part in (k, q))
        for row in range(len(rows)):
            for at in [row, row + 1] if early == row + 1 else [row]:
                if at != lost:
                    stored = v[at] - (state @ k[at][..., None])[..., 0]
                    state = state + stored[..., None] * k[at][:, None]
            found[layer, row] = (state @ q[row][..., None])[..., 0]
        states.append(state)
    return found.to(torch.bfloat16), torch.stack(states)


@pytest.mark.parametrize("kind", ["gdn4x2", "kda2x2"])
def test_a_token_that_was_lost_and_overwritten_is_named_though_the_states_are_right(kind: str) -> None:
    data = data_of(kind)
    out, states = run(data, lost=LOST)
    assert float((states - recur(data).states[:, 0]).abs().max()) < 0.01, "no state shows it"
    found = read_text(data, list(out))
    assert found is not None
    assert found[0].startswith(f"token {7 + LOST} of request 0 was not applied to its state: the row of token")
    assert found[1][:2] == (0, LOST)


def test_a_token_that_is_applied_before_the_row_in_front_of_it_is_read_is_named() -> None:
    data = data_of("gdn4x2")
    out, _ = run(data, early=LOST)
    found = read_text(data, list(out))
    assert found is not None
    text = f"token {7 + LOST} of request 0 was applied before the row of token {6 + LOST} was read"
    assert found == (text, (0, LOST - 1, found[1][2]))


@pytest.mark.parametrize("kind", ["gdn4x2", "kda2x2", "mamba4x2"])
def test_right_outputs_in_bf16_name_no_token(kind: str) -> None:
    data = data_of(kind)
    assert read_text(data, list(recur(data).out.to(torch.bfloat16))) is None


@pytest.mark.parametrize("lost", [*range(0, 90, 7), 89])
def test_every_token_shows_in_an_output_or_in_the_state(lost: int) -> None:
    data = data_of("gdn4x2")
    out, states = run(data, lost=lost)
    shown = read_text(data, list(out)) is not None
    assert shown or float((states - recur(data).states[:, 0]).abs().max()) > 0.5
    overwritten = bool((data.unit_keys[0, lost + 1 : 90, 0] == data.unit_keys[0, lost, 0]).any())
    assert shown or not overwritten
