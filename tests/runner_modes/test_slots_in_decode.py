"""Decodes without a draft, on instances with a slot for each node: they continue what the last draft left."""

from __future__ import annotations

import pytest
import torch
from in_process import check_backend

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.families.recurrent.data import make_state_data
from attn_testkit.families.recurrent.memory import _held_by_lists, from_rows
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.catalogue import entry_of

_OF = "shuffled-mild_decay-k64w4s32.null"
LOOP = f"target-verify-gdn4x2-d64-bf16-p16-k66.33.1-chain4-loop4-{_OF}.slots_in_decode-b4prod"
ALL_MODES = f"target-verify-gdn4x2-d64-bf16-p16-k33.5.12-chain4-{_OF}.slots_in_decode-layers1from0-b4prod-multi_mode"


def decode_of(case: str) -> Case:
    """The decode on the instance of a target-verify."""
    return co_residents(parse_case(case), {ForwardMode.DECODE}, max_q_rows=4)[0]


@pytest.mark.parametrize("case", [LOOP, ALL_MODES])
def test_a_backend_whose_decodes_read_the_slot_of_the_last_accepted_node_passes(case: str) -> None:
    found = check_backend(entry_of("states-by-slots-in-decode-too").backend, cases=[case], device="cpu")
    assert {each.status.value for each in found if each.case == case} == {"passed"}


@pytest.mark.parametrize(
    "slug",
    [
        "decode-after-a-draft-reads-the-first-slot",
        "window-of-a-decode-begins-at-column-zero",
        "decode-stores-where-it-read",
    ],
)
def test_a_decode_that_ignores_the_accepted_count_fails_the_loop_of_verifies(slug: str) -> None:
    fault = entry_of(slug)
    found = [
        each
        for each in check_backend(fault.backend, cases=[LOOP], device="cpu", diagnose="none", executions=["eager"])
        if each.case == LOOP
    ]
    assert [{finding.check for finding in each.findings} for each in found] == [{"lossless"}]


def test_a_decode_has_the_slots_of_a_draft_and_stores_only_in_the_first() -> None:
    schedule = make_schedule(decode_of(ALL_MODES))
    taken = set[int]()
    for step in schedule.steps:
        data = make_state_data(schedule, step)
        assert data.lists.shape == (step.bs, 4)
        assert [end.slot for end in data.ends] == data.lists[:, 0].tolist()
        taken.update(data.taken)
    assert taken == {1, 2, 3, 4}
    plain = make_schedule(decode_of(ALL_MODES.replace("slots_in_decode", "slots")))
    assert {make_state_data(plain, step).lists.shape[1] for step in plain.steps} == {1}


def test_the_window_before_a_decode_begins_at_the_column_of_the_last_accepted_node_and_after_it_at_the_first() -> None:
    schedule = make_schedule(decode_of(ALL_MODES))
    step = next(each for each in schedule.steps if max(make_state_data(schedule, each).taken) == 4)
    data = make_state_data(schedule, step)
    request = data.taken.index(4)
    slots, rows = _held_by_lists(data)
    of_first = slots.tolist().index(data.lists[request, 0])
    columns, width = data.shape.window_columns(4), data.windows.shape[-1]
    channels = data.windows.shape[2]
    size = channels * columns * data.windows.dtype.itemsize
    held = torch.from_numpy(rows)[:, of_first, :size].contiguous().view(data.windows.dtype).view(-1, channels, columns)
    assert torch.equal(held[..., 3 : 3 + width], data.windows[:, request])
    assert held[..., :3].isnan().all()
    behind = recur(data).windows[:, request]
    assert torch.equal(behind[..., :-1], data.windows[:, request, :, 1:])
    windows, _ = from_rows(torch.from_numpy(rows), data)
    assert windows.shape[-1] == width, "later columns may hold anything"


def test_core_has_a_loop_and_an_instance_of_all_modes_and_no_other_case_differs() -> None:
    declared = entry_of("states-by-slots-in-decode-too").backend.capabilities
    both = declared.with_changes(state={"rollback": {"slots", "slots_in_decode"}})
    found = [
        case for case in generate(both, ForwardMode.TARGET_VERIFY, "core") if case.state.rollback == "slots_in_decode"
    ]
    assert sorted({(bool(case.rounds), case.multi_mode) for case in found}) == [(False, True), (True, False)]
