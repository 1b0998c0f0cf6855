"""Stochastic rounding of states: a fair rounding passes, and each unfair one is found by its own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_testkit.backends.stochastic_rounding import StochasticRounding
from attn_testkit.cases.case import parse_case
from attn_testkit.checks.state_rounding import rounds_anew, rounds_fairly
from attn_testkit.families.recurrent.data import make_state_data
from attn_testkit.families.recurrent.memory import as_rows
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-mamba2x2-d32-bf16-p16-k5.1.30-shuffled-fair_rounding-k32w4s{}.stochastic-layers1from0-b3prod"
SCHEDULE = make_schedule(parse_case(CASE.format(16)))
Rounds = Callable[[torch.Tensor], torch.Tensor]


def observed(rounds: Rounds, count: int = 3) -> list[Any]:
    """Observations of steps whose states are ``rounds`` of the exact ones."""
    found = []
    for step in [each for each in SCHEDULE.steps if each.requests][:count]:
        data = make_state_data(SCHEDULE, step)
        right = recur(data)
        slots, order = torch.tensor([end.slot for end in data.ends]).sort()
        rows = as_rows(right.windows, rounds(right.states.float()).to(data.states.dtype), data.shape.order)[:, order]
        seen = SimpleNamespace(
            schedule=SCHEDULE, step=step, label=step.name, inputs=SimpleNamespace(data=data),
            written=(slots, rows[:, None, :, None]),
        )  # fmt: skip
        seen.of_family = lambda _, seen=seen: seen
        found.append(seen)
    return found


def texts(steps: Sequence[Any]) -> list[str]:
    found = [finding for each in steps for finding in rounds_fairly(each)] + rounds_anew(steps)
    return [finding.headline for finding in found]


def fair() -> Rounds:
    stochastic = StochasticRounding(torch.device("cpu"))
    return lambda states: stochastic(states, torch.float16)


def of_numbers(change: Callable[[torch.Tensor], torch.Tensor]) -> Rounds:
    """A rounding whose random numbers are changed."""
    stochastic = StochasticRounding(torch.device("cpu"))
    plain = stochastic.uniform
    stochastic.uniform = lambda like: change(plain(like))  # type: ignore[method-assign]
    return lambda states: stochastic(states, torch.float16)


def test_a_fair_rounding_passes_many_times() -> None:
    rounds = fair()
    for _ in range(2):
        assert texts(observed(rounds)) == []


@pytest.mark.parametrize(
    ("rounds", "text"),
    [
        (of_numbers(lambda numbers: numbers * 0.0), "rounded up on average"),
        (of_numbers(lambda numbers: 1 - 2.0**-20 + numbers * 0.0), "rounded down on average"),
        (of_numbers(lambda numbers: numbers * 0.75), "rounded up on average by 0.1"),
        (of_numbers(lambda numbers: numbers[..., :1].expand_as(numbers)), "columns of a state are not rounded"),
        (of_numbers(lambda numbers: numbers[..., :1, :].expand_as(numbers)), "rows of a state are not rounded"),
        (of_numbers(lambda numbers: numbers[:, :, :1].expand_as(numbers)), "heads are not rounded"),
        (of_numbers(lambda numbers: numbers[:, :1].expand_as(numbers)), "requests are not rounded"),
        (lambda states: states, "not rounded stochastically"),
        (lambda states: states * (1 + 2.0**-9), "over a unit from"),
    ],
)
def test_an_unfair_rounding_is_found_by_its_own_text(rounds: Rounds, text: str) -> None:
    assert text in texts(observed(rounds, 1))[0]


def test_steps_with_the_same_random_numbers_are_found_and_each_step_alone_is_fair() -> None:
    def frozen(states: torch.Tensor) -> torch.Tensor:
        return fair()(states)

    steps = observed(frozen)
    assert [finding for each in steps for finding in rounds_fairly(each)] == []
    assert "random numbers of the step before it" in rounds_anew(steps)[0].headline


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_the_dtype_stay_as_they_are(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -2.5, 2.0**-14, -(2.0**-14), 0.099]).to(dtype)
    assert torch.equal(StochasticRounding(torch.device("cpu"))(values.float(), dtype), values)


def test_only_decodes_of_16_bit_states_round_stochastically() -> None:
    for wrong in (
        CASE.format(32),
        CASE.format(16).replace("decode-", "extend-").replace("-shuffled", "-n1a1-shuffled"),
    ):
        with pytest.raises(ValueError, match=r"round|stored as it is computed"):
            parse_case(wrong)
    with pytest.raises(ValueError, match="nearest number"):
        parse_case(CASE.format(16).replace(".stochastic", ""))
