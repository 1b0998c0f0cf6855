"""When a row is another one: within every limit of it, the same bits as it, and never because both are nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.schedule import make_schedule
from attn_testkit.checks import Judgement
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis.swapped_rows import _like, find_swapped
from attn_testkit.oracle.expect import expect

LIMIT = 0.5
SHAPE = (2, 3, 2, 4)
"""Layers, rows, heads, values."""


def rows() -> torch.Tensor:
    """Each head of each layer has one value beyond its limit, another one in each, and row 1 is the largest."""
    right = torch.zeros(SHAPE, dtype=torch.float64)
    for layer in (0, 1):
        for head in (0, 1):
            right[layer, :, head, 2 * layer + head] = torch.tensor([0.75, 4.0, -0.75], dtype=torch.float64)
    return right


def like(out: torch.Tensor, right: torch.Tensor) -> list[bool]:
    found: list[bool] = _like(out, right, torch.full(SHAPE, LIMIT, dtype=torch.float64)).tolist()
    return found


def test_a_row_at_its_limits_is_the_other_and_one_value_beyond_is_enough_to_be_none() -> None:
    right = rows()
    assert like(right[:, 1], right) == [False, True, False]
    assert like(right[:, 1] + LIMIT, right) == [False, True, False]
    for at in ((0, 0, 0), (1, 1, 3)):
        out = right[:, 1] - LIMIT
        out[at] -= 1e-9
        assert like(out, right) == [False] * 3


@pytest.mark.parametrize("at", [(0, 0), (1, 1)])
def test_a_row_with_a_head_that_is_within_its_limits_of_zero_is_nobodys(at: tuple[int, int]) -> None:
    right = rows()
    right[at[0], 1, at[1]] = LIMIT
    assert like(right[:, 1], right) == [False] * 3
    assert like(right[:, 0], right)[0]


SCHEDULE = make_schedule(parse_case("draft-extend-gqa2x2-d32-fp32-p4-k5.9.14-n3a2.3x2-shuffled-gauss-b3prod"))
"""Rows 0 and 1 are request 0's, rows 5 to 7 request 2's."""


def told(change: Callable[[torch.Tensor], None], **limits: float) -> list[str]:
    step = SCHEDULE.steps[0]
    expected = expect(SCHEDULE, step)
    if "row" in limits:
        expected = replace(expected, row_limit=torch.full_like(expected.row_limit, limits["row"]))
    out = expected.attention.float().clone()
    change(out)
    copies = copies_of([("attention", str(layer), each) for layer, each in enumerate(out.unbind(0))])
    judgement = Judgement(Observation(SCHEDULE, step, "", copies), expected)
    return [row.text for row in find_swapped(None, SCHEDULE, judgement, in_graph=False)]


def copied(values: torch.Tensor) -> list[str]:
    """Row 0 and a row of request 2 hold ``values`` [L, Hq, Dv], which are nobody's."""

    def change(out: torch.Tensor) -> None:
        out[:, 0] = out[:, 5] = values

    return told(change)


COPIES = ["request 0 holds the same values as request 2", "request 2 holds the same values as request 0"]


def nobodys() -> Any:
    return torch.arange(1.0, 257.0).view(2, 4, 32)


def test_the_same_bits_are_a_copy_though_a_head_or_a_value_of_each_is_zero() -> None:
    assert copied(nobodys()) == COPIES
    assert copied(nobodys() / 1e6) == COPIES, "small numbers are numbers"
    head, value = nobodys(), nobodys()
    head[:, 1] = 0.0
    value[:, :, 7] = 0.0
    assert copied(head) == copied(value) == COPIES


def test_nothing_is_no_copy_of_nothing() -> None:
    layer = nobodys()
    layer[0] = 0.0
    assert copied(layer) == copied(torch.zeros(2, 4, 32)) == []


def test_one_value_that_is_the_same_is_no_copy() -> None:
    def change(out: torch.Tensor) -> None:
        out[:, 0] = nobodys()
        out[:, 5] = -nobodys()
        out[:, 5, 0, 0] = out[:, 0, 0, 0]

    assert told(change) == []


def test_a_row_that_is_wrong_as_a_whole_alone_is_not_called_its_own() -> None:
    def change(out: torch.Tensor) -> None:
        out[:, 0, 0, 0] += 1e-7

    assert told(change) == []
    assert told(change, row=1e-9) == []
