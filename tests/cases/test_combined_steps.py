"""Steps of an instance in which everything that varies from step to step is combined."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.data_pattern import REVEALING
from attn_testkit.steps.schedule import Step, make_schedule

CASE = "decode-gqa2x2-d32-bf16-p4-k5.9.30-{}-{}-b4{}"
VARIED = CASE.format("shuffled", "gauss-w4-layers3from0varied", "prod")


def combined(case_id: str, seed: int = 0) -> list[Step]:
    steps = make_schedule(parse_case(case_id).with_seed(seed)).steps
    return [step for step in steps if step.label.startswith("combined values")]


def test_layers_with_options_of_their_own_have_three_and_others_one() -> None:
    assert [len(combined(VARIED)), len(combined(CASE.format("shuffled", "gauss", "prod")))] == [3, 1]
    schedule = make_schedule(parse_case(VARIED))
    assert list(schedule.steps[-3:]) == combined(VARIED), "behind those that are made for something"
    loop = "draft-decode-mha2-d32-bf16-p4-k5-topk1steps3-loop6-shuffled-gauss-b2prod"
    assert combined(loop) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_last_step_of_modes_that_alternate_has_several_requests(seed: int) -> None:
    (last,) = combined(CASE.format("shuffled", "gauss", "prod") + "-multi_mode", seed)
    assert last.bs > 1
    assert last.bucket == 4


def test_each_takes_values_that_no_other_of_its_case_has() -> None:
    for seed in range(30):
        steps = combined(VARIED, seed)
        for values in ([step.layout for step in steps], [step.padding for step in steps], [s.data for s in steps]):
            assert len(set(values)) == 3


def test_cases_together_meet_every_triple_of_values() -> None:
    steps = [step for seed in range(300) for step in combined(VARIED, seed)]
    values = [(step.layout, step.padding, step.data, step.bucket, min(step.bs, 3)) for step in steps]
    columns = list(zip(*values, strict=True))
    assert set(columns[0]) == {"contiguous", "shuffled", "interleaved", "reversed"}
    assert set(columns[1]) == {"prod", "nan", "stale"}
    assert set(columns[2]) == set(REVEALING)
    assert (set(columns[3]), set(columns[4])) == ({2, 4}, {1, 2, 3})
    for some in combinations(range(4), 3):
        met = {tuple(value[place] for place in some) for value in values}
        assert met == set(product(*(set(columns[place]) for place in some)))


def test_no_request_is_longer_than_those_of_other_steps_and_a_step_has_512_keys_at_most() -> None:
    lens = set()
    for seed in range(60):
        steps = make_schedule(parse_case(VARIED).with_seed(seed)).steps
        longest = max(request.prefix for step in steps[:-3] for request in step.requests)
        for step in combined(VARIED, seed):
            lens |= {request.prefix for request in step.requests}
            assert step.bs <= step.bucket
            assert max(request.prefix for request in step.requests) <= longest
    assert lens >= {0, 1, 7, 8, 13, 21}
    for seed in range(20):
        for step in combined(
            CASE.format("shuffled", "gauss-layers3from0varied", "prod").replace("5.9.30", "900"), seed
        ):
            assert sum(request.prefix for request in step.requests) <= 512


@pytest.mark.parametrize("data", ["peaked", "plus_minus_one"])
def test_a_pattern_of_large_logits_or_of_codes_stays_in_cases_that_name_it(data: str) -> None:
    others = {step.data for seed in range(20) for step in combined(VARIED, seed)}
    assert others == set(REVEALING)
    named = {step.data for seed in range(20) for step in combined(VARIED.replace("gauss", data), seed)}
    assert named == ({"plus_minus_one"} if data == "plus_minus_one" else {*REVEALING, data})


def test_shared_pages_and_rows_of_small_requests_stay_so_in_every_step() -> None:
    steps = make_schedule(parse_case(CASE.format("shared", "gauss", "small"))).steps
    assert {(step.layout, step.padding) for step in steps} == {("shared", "small")}
    assert all(step.bs == step.bucket for step in steps)
