"""Bits that must be the same: in every layer, in every row of the request, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from by_hand import VERIFY, expected_zeros, observation, schedule_of, zeros_like

from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.checks.sameness import batch_invariant, mode_invariant, repeatable
from attn_testkit.contract import Capabilities, HeadShapes, KVPools, Precision, Promises
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
        assert finding.headline == f"request {request} gives different bits in a batch of 2 than in a batch of 2"


def test_equal_nan_is_the_same_bits() -> None:
    out = torch.full((LAYERS, ROWS, HEADS, DIMS), torch.nan)
    assert repeatable(observation(SCHEDULE, EXPECTED, out), observation(SCHEDULE, EXPECTED, out.clone())) == []


@pytest.mark.parametrize(("row", "named"), [(0, None), (1, 0), (2, None), (4, 1)])
@pytest.mark.parametrize("layer", range(2))
def test_the_last_rows_of_an_extend_have_the_bits_of_another_mode(layer: int, row: int, named: int | None) -> None:
    own = schedule_of("extend-gqa2x2-d32-fp32-p4-k5.9-n3a2.3-shuffled-gauss-b2prod")
    declared = Capabilities(
        eager={"extend", "decode"},
        promises=Promises(mode_invariant=True),
        heads=HeadShapes(families={"gqa"}, head_dims={32}),
        precision=Precision(dtypes={"fp32"}),
        kv_pool=KVPools(page_sizes={4}),
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
        assert "different bits in decode than" in each.headline
        assert "in one of the modes" in each.hint
        assert "different bits in a replay of decode in bucket 2 than" in other.headline
        assert "at capture" in other.hint


SELECTS = schedule_of("decode-mqa4-d64-bf16-p16-k40.33-shuffled-gauss-sel4-idx4ties-b2prod")
KEYS = torch.tensor([[3, 1, 0, 2], [7, 4, 5, -1]], dtype=torch.int32)


def selecting(*layers: torch.Tensor, step=SELECTS.steps[0]):
    """A step whose attention is always the same, with the selections [T, topk] of its layers."""
    pieces = [("selected", str(layer), keys) for layer, keys in enumerate(layers)]
    rows = len(layers[0])
    pieces += [("attention", str(layer), torch.zeros(rows, 4, 64)) for layer in range(2)]
    return Observation(SELECTS, step, "a step", copies_of(pieces))


def with_key(row: int, column: int, key: int) -> torch.Tensor:
    keys = KEYS.clone()
    keys[row, column] = key
    return keys


@pytest.mark.parametrize("layer", range(2))
@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 3)])
def test_a_second_run_that_selects_another_key_is_not_repeatable(layer: int, row: int, column: int) -> None:
    layers = [KEYS, KEYS]
    layers[layer] = with_key(row, column, 9)
    (finding,) = repeatable(selecting(KEYS, KEYS), selecting(*layers))
    assert finding.check == "repeatable"
    assert finding.where == f"layer {layer}: 1 of 2 rows select different keys"
    assert "a different selection the second time" in finding.headline


def test_the_order_of_the_keys_of_a_row_may_change_and_their_row_may_not() -> None:
    assert repeatable(selecting(KEYS, KEYS), selecting(KEYS.flip(1), KEYS)) == []
    (finding,) = repeatable(selecting(KEYS, KEYS), selecting(KEYS.flip(0), KEYS))
    assert finding.where == "layer 0: 2 of 2 rows select different keys"


@pytest.mark.parametrize("layer", range(2))
def test_a_request_that_selects_another_key_alone_is_not_batch_invariant(layer: int) -> None:
    alone = selecting(KEYS[1:], KEYS[1:], step=only(SELECTS.steps[0], 1))
    assert batch_invariant(selecting(with_key(0, 0, 9), KEYS.flip(1)), alone) == [], "the rows of request 1 are equal"
    layers = [KEYS, KEYS]
    layers[layer] = with_key(1, 0, 9)
    (finding,) = batch_invariant(selecting(*layers), alone)
    assert finding.check == "batch-invariant"
    assert finding.headline == "request 1 selects different keys by itself than in a batch of 2"
    assert finding.where == f"layer {layer}: 1 of 1 rows select different keys"
