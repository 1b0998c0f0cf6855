"""Bits that must be the same: in every layer, in every row of the request, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from by_hand import VERIFY, expected_zeros, observation, schedule_of, zeros_like

from attn_testkit.checks.sameness import batch_invariant, mode_invariant, repeatable
from attn_testkit.contract import Capabilities
from attn_testkit.steps.last_rows import last_rows_of
from attn_testkit.steps.schedule import only, part

SCHEDULE = schedule_of(VERIFY)
STEP = SCHEDULE.steps[0]
EXPECTED = expected_zeros(SCHEDULE)
LAYERS, ROWS, HEADS, DIMS = zeros_like(EXPECTED).shape
OWN = ROWS // 2
"""The first row of request 1."""


def changed(*at: int) -> torch.Tensor:
    out = zeros_like(EXPECTED)
    out[at] = -0.0
    return out


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (LAYERS - 1, ROWS - 1, HEADS - 1, DIMS - 1), (1, 0, 0, 0)])
def test_a_second_run_that_differs_in_one_bit_of_any_layer_is_not_repeatable(at: tuple[int, ...]) -> None:
    first = observation(SCHEDULE, EXPECTED)
    assert repeatable(first, observation(SCHEDULE, EXPECTED)) == []
    (finding,) = repeatable(first, observation(SCHEDULE, EXPECTED, changed(*at)))
    assert finding.where == f"layer {at[0]}: 1 of {ROWS * HEADS * DIMS} values differ"


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("row", [OWN, ROWS - 1])
def test_a_request_that_gives_another_bit_alone_is_not_batch_invariant(layer: int, row: int) -> None:
    alone = observation(SCHEDULE, EXPECTED, zeros_like(EXPECTED)[:, OWN:], step=only(STEP, 1))
    together = observation(SCHEDULE, EXPECTED, changed(layer, row, 0, 0))
    (finding,) = batch_invariant(together, alone)
    assert finding.where == f"layer {layer}: 1 of {(ROWS - OWN) * HEADS * DIMS} values differ"


def test_rows_of_other_requests_may_differ() -> None:
    alone = observation(SCHEDULE, EXPECTED, zeros_like(EXPECTED)[:, OWN:], step=only(STEP, 1))
    assert batch_invariant(observation(SCHEDULE, EXPECTED, changed(0, OWN - 1, 0, 0)), alone) == []


def test_a_part_of_the_batch_is_held_against_it_request_by_request_whatever_their_order() -> None:
    both = zeros_like(EXPECTED)
    swapped = observation(SCHEDULE, EXPECTED, torch.cat([both[:, OWN:], both[:, :OWN]], 1), step=part(STEP, (1, 0)))
    assert batch_invariant(observation(SCHEDULE, EXPECTED), swapped) == []
    for request, row in ((0, OWN - 1), (1, OWN), (0, 0), (1, ROWS - 1)):
        (finding,) = batch_invariant(observation(SCHEDULE, EXPECTED, changed(0, row, 0, 0)), swapped)
        assert finding.headline == f"request {request} gives other bits in a batch of 2 than in a batch of 2"


def test_equal_nan_is_the_same_bits() -> None:
    out = torch.full((LAYERS, ROWS, HEADS, DIMS), torch.nan)
    assert repeatable(observation(SCHEDULE, EXPECTED, out), observation(SCHEDULE, EXPECTED, out.clone())) == []


@pytest.mark.parametrize(("row", "named"), [(0, None), (1, 0), (2, None), (4, 1)])
@pytest.mark.parametrize("layer", range(2))
def test_the_last_rows_of_an_extend_have_the_bits_of_another_mode(layer: int, row: int, named: int | None) -> None:
    own = schedule_of("extend-gqa2x2-d32-fp32-p4-k5.9-n3a2.3-shuffled-gauss-b2prod")
    declared = Capabilities(
        eager={"extend", "decode"},
        mode_invariant=True,
        families={"gqa"},
        head_dims={32},
        dtypes={"fp32"},
        page_sizes={4},
    )
    (decode,) = last_rows_of(own, declared)
    expected, mine = expected_zeros(own), expected_zeros(decode)
    out = zeros_like(expected)
    out[layer, row] = -0.0
    step = decode.steps[0]
    found = mode_invariant(observation(own, expected, out), observation(decode, mine, step=step))
    assert [each.headline.split(" gives")[0] for each in found] == ([] if named is None else [f"request {named}"])
    assert all(each.where.startswith(f"layer {layer}: ") for each in found)
    replayed = mode_invariant(observation(own, expected, out), observation(decode, mine, step=step, replay=True))
    for each, other in zip(found, replayed, strict=True):
        assert "other bits in decode than" in each.headline
        assert "in one of the modes" in each.hint
        assert "other bits in a replay of decode in bucket 2 than" in other.headline
        assert "at capture" in other.hint
