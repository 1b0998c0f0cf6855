"""Instances with several modes and states, prefills beyond a grid, and what follows the last row in memory."""

from __future__ import annotations

import math

import pytest
import torch
from attn_testkit.runner_modes.graphs import in_graphs

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import declared_co_residents
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, State
from attn_testkit.families.recurrent.data import make_state_data, state_layers
from attn_testkit.model import Around, Model, row_width
from attn_testkit.steps.data import HIDDEN
from attn_testkit.steps.schedule import make_schedule

DECLARED = TorchNativeStateBackend.capabilities
MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


def on_one_instance(declared: Capabilities) -> dict[ForwardMode, list[Case]]:
    return {mode: [each for each in generate(declared, mode, "core") if each.multi_mode] for mode in MODES}


def test_core_has_prompts_with_copies_and_drafts_on_one_instance() -> None:
    """SGLang made no copies for its prefix cache on instances that speculate (sglang #34043)."""
    found = on_one_instance(DECLARED)
    cases = found.pop(ForwardMode.TARGET_VERIFY)
    assert not any(found.values())
    committed = [case for case in cases if not case.by_slots]
    assert len({case.heads.family for case in committed}) == len(committed) == 2
    assert [case.state.rollback for case in cases if case.by_slots and case.state] == [
        "slots", "slots_in_decode", "slots_moved",
    ]  # fmt: skip
    for case in committed:
        others = {each.mode: each for each in declared_co_residents(DECLARED, case, MODES)}
        assert set(others) == {ForwardMode.DECODE, ForwardMode.EXTEND}
        assert {each.state for each in others.values()} == {case.state}
        extend, state = others[ForwardMode.EXTEND], case.state
        assert state is not None
        assert state.snapshots == min(DECLARED.state.snapshots if DECLARED.state else ())
        assert {new // state.snapshots for new in extend.new} == {0, 1}
        schedule = make_schedule(extend)
        copied = [any(make_state_data(schedule, step).snapshot_rows) for step in schedule.steps if step.requests]
        assert any(copied), "prompts of a step are copied"


def test_prompts_are_as_long_as_the_drafts_of_an_instance_with_slots() -> None:
    """vLLM took such a prefill for a verify (#53051), and its decode read the table of slots as flat (#52792)."""
    slots = DECLARED.with_changes(bounds={"max_topk": 1}, state=State(k_dims={32}, rollback={"slots"}))
    hosts = on_one_instance(slots)[ForwardMode.TARGET_VERIFY]
    assert len({host.heads.family for host in hosts}) == len(hosts) == 2
    host = hosts[0]
    others = {each.mode: each for each in declared_co_residents(slots, host, MODES)}
    assert others[ForwardMode.EXTEND].new == (host.width,) * host.bs
    for other in others.values():
        schedule = make_schedule(other)
        data = make_state_data(schedule, schedule.steps[0])
        assert (data.lists.shape[1], data.more_columns) == (1, host.width - 1)
    schedules = [make_schedule(each) for each in (host, *others.values())]
    assert in_graphs(schedules, slots) == schedules[:1], "vLLM captures drafts only"


def test_only_a_verify_names_an_instance_with_a_slot_for_each_node() -> None:
    decode = parse_case("decode-gdn4x2-d32-bf16-p16-k33.5-shuffled-mild_decay-k32w4s32-b2prod-multi_mode")
    assert not not_declared(DECLARED, decode)
    slots = DECLARED.with_changes(bounds={"max_topk": 1}, state=State(k_dims={32}, rollback={"slots"}))
    assert "a mode without drafts" in not_declared(slots, decode)


def test_an_instance_of_several_modes_goes_by_what_is_declared() -> None:
    plain = DECLARED.with_changes(bounds={"max_topk": 1}, state=State(k_dims={32}))
    without = plain.with_changes(eager=MODES - {ForwardMode.TARGET_VERIFY}, graph={ForwardMode.DECODE})
    hosts = on_one_instance(without)
    assert [mode for mode, cases in hosts.items() if cases] == [ForwardMode.DECODE]
    short = DECLARED.with_changes(bounds={"max_extend_tokens": 5})
    (host, *_) = on_one_instance(short)[ForwardMode.TARGET_VERIFY]
    (extend,) = (each for each in declared_co_residents(short, host, {ForwardMode.EXTEND}))
    assert extend.new == (5, 5, 3)
    alone = plain.with_changes(eager={ForwardMode.DECODE}, graph={ForwardMode.DECODE})
    assert not any(on_one_instance(alone).values())


@pytest.mark.parametrize(("width", "there"), [(16, True), (32, False)])
def test_a_batch_beyond_a_grid_is_one_of_narrow_heads(width: int, there: bool) -> None:
    """64 heads of 16 by 16 take 5 GB for 1,024 requests; wider ones would take more than machines have. A decode beyond
    a grid failed, too (vLLM #52030).
    """
    declared = DECLARED.with_changes(
        bounds={"max_topk": 1}, heads={"head_dims": {width, 64}}, state=State(k_dims={width, 64})
    )
    cases = [case for mode in MODES for case in generate(declared, mode, "core") if case.bs > 1000]
    assert {case.mode: case.bs * case.heads.q_heads for case in cases} == (
        {ForwardMode.DECODE: 65_536, ForwardMode.EXTEND: 65_536} if there else {}
    )
    assert len(cases) == 2 * there
    assert all(case.new in ((1,) * case.bs, ()) and 0 in case.prefixes for case in cases)


@pytest.mark.parametrize("contiguous", [False, True])
def test_rows_of_nan_follow_the_last_row_in_half_of_the_cases(contiguous: bool) -> None:
    """A tile counts rows behind the last one with a weight of 0 (vllm-ascend #10276)."""
    cases = [case for mode in MODES for case in generate(DECLARED, mode, "core")]
    behind = [case for case in cases if case.has_rows_behind]
    assert 0.4 < len(behind) / len(cases) < 0.6
    for case, rows in ((behind[0], 64), (next(each for each in cases if not each.has_rows_behind), 0)):
        layers = state_layers(case)
        table = torch.rand(9, len(layers), row_width(layers, torch.float32)).index_fill_(0, torch.tensor([8]), math.nan)
        model = Model(case, layers, table, torch.rand(9, HIDDEN))
        around = Around(model, torch.tensor([2, 0, 1]), contiguous)
        for each in around.before(0, None):
            assert len(each) == 3
            assert each.isfinite().all()
            if each.shape[1]:
                end = each.storage_offset() + 3 * each.stride(0)
                room = each.untyped_storage().nbytes() // 4 - end - each.shape[1]
                left = max(0, room // each.stride(0) + 1)
                memory = each.as_strided((left, each.shape[1]), each.stride(), end)
                assert memory.isnan().all()
                assert left == rows
        assert around.packed.shape == (3, *table.shape[1:])


def test_modes_of_an_instance_agree_about_what_follows_their_rows() -> None:
    (host, *_) = on_one_instance(DECLARED)[ForwardMode.TARGET_VERIFY]
    assert {each.has_rows_behind for each in declared_co_residents(DECLARED, host, MODES)} == {host.has_rows_behind}
    assert not parse_case("decode-mha2-d64-bf16-p16-k5-shuffled-gauss-b1prod").has_rows_behind


def test_core_has_heads_that_fill_more_than_one_box_of_eight_and_not_two() -> None:
    """FlashInfer's KDA failed with 12 heads, and not with 8 or fewer (flashinfer #4351)."""
    for mode in MODES:
        odd = [case for case in generate(DECLARED, mode, "core") if case.heads.q_heads > 8 and case.heads.q_heads % 8]
        assert {case.heads.family for case in odd} == DECLARED.heads.families


def test_a_prefill_of_a_single_row_is_followed_by_one_of_more() -> None:
    """A kernel that was compiled for one row served all later prefills (sglang #35197)."""
    (alone,) = [case for case in generate(DECLARED, ForwardMode.EXTEND, "core") if case.new == (1,)]
    schedule = make_schedule(alone)
    rows = [sum(request.new for request in step.requests) for step in (schedule.steps[0], schedule.second)]
    assert rows == [1, 20]
