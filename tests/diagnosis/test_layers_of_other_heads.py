"""A step of layers that differ in their heads, judged: what a layer lacks is neither right nor wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.checks.numeric import finite, matches_oracle, output_written
from attn_testkit.checks.observation import Observation, copies_of
from attn_testkit.diagnosis.hints import Evidence, heads
from attn_testkit.diagnosis.misrouted_rows import find_misrouted
from attn_testkit.families.expected import expect
from attn_testkit.steps.schedule import make_schedule

CASE = "decode-gqa2x4-d64-fp32-p4-k19.40.6-shuffled-gauss-layers3from5by4x2d32.8x4d64-b4prod"
SCHEDULE = make_schedule(parse_case(CASE))
MAPS = SCHEDULE.case.head_maps


def right() -> list[torch.Tensor]:
    """What layers return: [T, Hq, Dv] of each."""
    expected = expect(SCHEDULE, SCHEDULE.steps[0]).attention.float()
    return [each.q_part(out).clone() for each, out in zip(MAPS, expected, strict=True)]


def evaluated(outs: list[torch.Tensor]) -> Comparison:
    copies = copies_of([("attention", str(i), out) for i, out in enumerate(outs)])
    step = SCHEDULE.steps[0]
    return Comparison(Observation(SCHEDULE, step, "", copies), expect(SCHEDULE, step))


def evidence(comparison: Comparison, **fields: Any) -> Evidence:
    return Evidence(SCHEDULE, comparison, None, [], in_graph=False, **fields)


@pytest.mark.parametrize("flat", [False, True])
def test_rows_of_the_layers_own_width_are_right_in_either_shape(flat: bool) -> None:
    comparison = evaluated([out.flatten(1) if flat else out for out in right()])
    assert comparison.right
    assert comparison.out.shape == comparison.exists.shape[:1] + comparison.expected.attention.shape[1:]
    assert [int(there.sum()) for there in comparison.exists] == [4 * 32, 8 * 64, 4 * 32]
    assert matches_oracle(comparison) == finite(comparison) == output_written(comparison) == []


def test_the_last_number_of_a_layer_counts_and_is_named_by_its_own_head_and_dim() -> None:
    outs = right()
    outs[2][1, -1, -1] += 9
    (found,) = matches_oracle(evaluated(outs))
    assert found.where.startswith("out[layer 7, request 1, head 3, dim 31] = ")
    assert found.spread.startswith("request 1 wrong in 1 of 128 values (1 of 1 rows)")
    assert found.spread.endswith("; only layer 7")
    outs[1][1, 0, 0] += 9
    (found,) = matches_oracle(evaluated(outs))
    assert "of 512 values" in found.spread, "as many as the widest of the wrong layers has"


def test_a_row_whose_norm_alone_is_wrong_is_wrong_in_what_the_layer_has() -> None:
    outs = right()
    limit = expect(SCHEDULE, SCHEDULE.steps[0]).attention_limit
    outs[0][0, 1] += 0.9 * MAPS[0].q_part(limit[0])[0, 1].float()
    comparison = evaluated(outs)
    assert not comparison.right
    assert int(comparison.wrong.sum()) == 32
    assert comparison.wrong[0, 0, 1, :32].all()


def test_a_row_of_nan_is_whole_though_the_case_is_wider() -> None:
    outs = right()
    outs[0][0, 1] = torch.nan
    assert heads.part_of_a_head(evidence(evaluated(outs))) == ""
    outs = right()
    outs[0][0, 1, 16:] = torch.nan
    assert heads.part_of_a_head(evidence(evaluated(outs))).startswith("only a part of a head's values")


def test_dims_to_the_last_are_those_of_the_wrong_layer() -> None:
    outs = right()
    outs[0][..., 16:] += 9
    assert heads.some_dims(evidence(evaluated(outs))).startswith(
        "only dims from 16 on are wrong: probably a head dim of 32"
    )
    outs[1][..., 16:] += 9
    assert heads.some_dims(evidence(evaluated(outs))) == "", "of which head dim?"


@pytest.mark.parametrize(("wrong", "said"), [((1,), True), ((0,), False), ((2,), False), ((0, 1), False)])
def test_layers_of_other_heads_than_the_first_are_named_where_they_alone_are_wrong(
    wrong: tuple[int, ...], said: bool
) -> None:
    outs = right()
    for place in wrong:
        outs[place] += 9
    found = heads.other_shape(evidence(evaluated(outs)))
    assert bool(found) is said
    if said:
        assert found.endswith(
            "only layers of 8 query and 4 KV heads of 64 are wrong, and the first layer has 4 and 2 of 32"
        )


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_that_is_anothers_is_found_in_a_layer_of_few_heads_too(place: int) -> None:
    outs = right()
    outs[place][0] = outs[place][2]
    (found,) = find_misrouted(None, SCHEDULE, evaluated(outs), in_graph=False)
    assert found.text == "request 0 holds the result of request 2"
    outs[place][0] = 0
    assert find_misrouted(None, SCHEDULE, evaluated(outs), in_graph=False) == (), "zeros are like none"
