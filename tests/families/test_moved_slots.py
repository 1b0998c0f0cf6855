"""States that a call moves to the first slot after a verify: slots and windows of a step, and the loop."""

from __future__ import annotations

from attn_testkit.cases.case import parse_case
from attn_testkit.families.recurrent.data import StateStepData, make_state_data
from attn_testkit.families.recurrent.recurrence import recur
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.steps.verify_loop import make_verify_loop

CASE = "target-verify-gdn2x2-d32-bf16-p16-k9.17.5-chain4-shuffled-mild_decay-k16w4s32.null.{}-b4prod"
LOOP = CASE.replace("-shuffled", "-loop4-shuffled")


def steps(rollback: str) -> list[StateStepData]:
    schedule = make_schedule(parse_case(CASE.format(rollback)))
    return [make_state_data(schedule, step) for step in schedule.steps if step.requests]


def test_the_first_slot_holds_the_accepted_state_and_its_window_and_later_slots_those_of_their_nodes() -> None:
    moved, kept_apart = steps("slots_moved"), steps("slots")
    assert any(len(set(step.kept)) > 1 for step in moved)
    for one, other in zip(moved, kept_apart, strict=True):
        by_slot = {end.slot: end for end in one.ends}
        for request, (own, kept) in enumerate(zip(one.lists.tolist(), one.kept, strict=True)):
            assert [by_slot[slot].rows for slot in own] == [kept, 2, 3, 4]
            assert [by_slot[slot].has_window for slot in own] == [True, False, False, False]
            assert by_slot[own[0]].request == request
        assert (one.nodes, one.more_columns) == (1, 3)
        assert (other.nodes, other.more_columns) == (4, 0)
        assert recur(one).windows.shape[-1] == 3
        assert set(one.taken) == {1}
    assert any(set(step.taken) != {1} for step in kept_apart)


def test_a_loop_decodes_requests_whose_drafts_were_moved() -> None:
    loops = {each: make_verify_loop(parse_case(LOOP.format(each))) for each in ("slots", "slots_moved")}
    decoded = {name: [loop.decodes_verified(number) for number in range(4)] for name, loop in loops.items()}
    assert decoded == {"slots": [False] * 4, "slots_moved": [False, True, False, True]}
