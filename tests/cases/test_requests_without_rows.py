"""Requests of an extend without rows: which cases have them, and that they stay between others in other steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.extend import EXTEND

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.rows import Extend
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.families.expected import expect
from attn_testkit.families.table import family_of
from attn_testkit.running.case_runs.case_run import request_to_isolate, with_other_requests
from attn_testkit.steps.patterns import marked_keys
from attn_testkit.steps.schedule import make_schedule

CASE = "extend-gqa2x2-d32-fp32-p4-k9.33.0.20.7-n4a0.5.0x2.3-shuffled-gauss-b6prod"
STATES = "extend-{}4x2-d64-bf16-p16-k5.3.9-n3a2.0.4-shuffled-unit_keys-k64w4s32-layers1from0-b3prod"


@pytest.mark.parametrize("new", [(0,), (0, 0), (-1, 3)])
def test_a_batch_has_a_row_and_no_request_has_fewer_than_none(new: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="0 or more per request, and at least one in total"):
        Extend(new, 4)
    assert Extend((0, 1), 4).new == (0, 1)


def test_only_backends_that_declare_the_convention_get_them() -> None:
    declared, case = TorchNativeBackend.capabilities, parse_case(CASE)
    without = declared.with_changes(server={"takes_requests_without_rows": False})
    assert not_declared(declared, case) == ""
    assert not_declared(without, case) == "requests without rows in extend"
    assert not_declared(without, parse_case(CASE.replace("a0.5.0x2.3", "a1x5"))) == ""
    assert not [each for each in generate(without, ForwardMode.EXTEND, "core") if 0 in each.new]
    even = [set(case.new) for case in generate(declared, ForwardMode.EXTEND, "core") if 0 in case.new]
    assert {0, 4} in even, "as many rows for each request that has any"
    states = TorchNativeStateBackend.capabilities
    of_states = [each for each in generate(states, ForwardMode.EXTEND, "core") if 0 in each.new]
    assert sorted(each.heads.family for each in of_states) == sorted(states.heads.families)
    assert not [each for each in generate(without, ForwardMode.EXTEND, "smoke") if 0 in each.new]


def test_a_request_without_rows_has_a_state_only_if_it_has_tokens_before() -> None:
    assert parse_case(STATES.format("gdn")).new == (2, 0, 4)
    with pytest.raises(ValueError, match="has no state to keep"):
        parse_case(STATES.format("gdn").replace("k5.3.9", "k5.0.9"))


def test_other_steps_have_requests_without_rows_between_others_too() -> None:
    schedule = make_schedule(parse_case(CASE))
    news = [[request.new for request in step.requests] for step in schedule.steps]
    between = [any(n == 0 and any(new[:i]) and any(new[i + 1 :]) for i, n in enumerate(new)) for new in news]
    assert sum(between) >= 3
    assert all(any(new) for new in news)
    plain = make_schedule(parse_case(CASE.replace("a0.5.0x2.3", "a1.5.1x2.3")))
    assert all(request.new for step in plain.steps for request in step.requests)


def test_a_step_has_numbers_for_rows_only_and_an_output_for_each_request() -> None:
    schedule = make_schedule(parse_case(CASE))
    step = schedule.steps[0]
    expected = expect(schedule, step)
    assert expected.data.row_request.tolist() == [1] * 5 + [4] * 3
    assert expected.attention.shape[1] == 8
    assert len(expected.hidden) == 5, "an output for each request: of row 0, its last, the last one's again, its own"
    assert torch.equal(expected.hidden[1], expected.hidden[2])
    assert not torch.equal(expected.hidden[0], expected.hidden[1])
    assert EXTEND.returned_rows is not None


def test_nobody_is_by_itself_without_rows() -> None:
    case = parse_case(CASE)
    step = make_schedule(case).steps[0]
    assert request_to_isolate(case, step) in (1, 4)
    parts = with_other_requests(case, step)
    assert sorted(index for each in parts for index in (each.part_of or (step, ()))[1]) == [1, 4]


@pytest.mark.parametrize("kind", ["gdn", "mamba"])
def test_the_state_of_a_request_without_rows_stays(kind: str) -> None:
    schedule = make_schedule(parse_case(STATES.format(kind)))
    step = schedule.steps[0]
    family = family_of(schedule.case)
    data = family.data(schedule, step, None)
    slot = data.slots.tolist()[1]
    before, after = (family.memory.image(schedule, step, data, False, after=after) for after in (False, True))
    assert torch.equal(before[:, :, slot], after[:, :, slot])
    assert not torch.equal(before[:, :, data.slots.tolist()[0]], after[:, :, data.slots.tolist()[0]])


def test_no_key_is_marked_for_a_request_without_keys() -> None:
    assert marked_keys(0, 8, np.random.default_rng(0)).tolist() == []
