"""The pool of states: its layouts, what it holds before a step, and what its watch sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import StatePool
from attn_testkit.families.recurrent.data import make_state_data, state_layers, state_pool_slots
from attn_testkit.families.recurrent.memory import STATE_POOL, StateWatch, as_rows, from_rows
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.watches.signaling_nan import fill_with_signaling_nan

CASE = "extend-gdn2x2-d32-bf16-p16-k0.17.5-n6a1.4.9-shuffled-mild_decay-k16w4s32{}-b3prod"


def pool_of(words: str = "") -> tuple[StatePool, StateWatch]:
    schedule = make_schedule(parse_case(CASE.format(words)))
    shape, layers = schedule.case.state, state_layers(schedule.case)
    assert shape is not None
    pool = StatePool(
        state_pool_slots(schedule), layers, torch.bfloat16, torch.float32, "cpu", shape.order, strided=shape.strided
    )
    return pool, StateWatch(pool, schedule)


def loaded(words: str = "", unowned: float = float("nan")):
    schedule = make_schedule(parse_case(CASE.format(words)))
    step = schedule.steps[0]
    data = make_state_data(schedule, step)
    pool, watch = pool_of(words)
    watch.fill(None, lambda: STATE_POOL.held(schedule, step, data, after=False), unowned)
    return pool, watch, data


def seen(watch: StateWatch, due: list[int]):
    found = [each.numpy() for each, _ in watch.look(0, torch.tensor(due), len(due))]
    return watch.written(np.array(due), found), watch.outside(found)


@pytest.mark.parametrize("words", ["", ".kv", ".strided", ".kv.strided"])
def test_slots_have_the_shapes_of_the_contract_and_share_no_byte(words: str) -> None:
    pool, _ = pool_of(words)
    for number, part in enumerate(pool.parts):
        part.fill_(number + 1)
    for number, part in enumerate(pool.parts):
        assert bool((part == number + 1).all())
    layer = pool.layers[0]
    assert pool.conv(layer.layer_id).shape == (pool.num_slots, 2 * 2 * 16 + 4 * 32, 3)
    assert pool.temporal(layer.layer_id).shape == (pool.num_slots, 4, *((16, 32) if "kv" in words else (32, 16)))
    dense = pool.temporal(layer.layer_id).stride(0) == 4 * 32 * 16
    assert dense is ("strided" not in words)


@pytest.mark.parametrize("words", ["", ".kv", ".strided"])
def test_rows_are_windows_and_states_there_and_back(words: str) -> None:
    _, _, data = loaded(words)
    windows, states = from_rows(as_rows(data.windows, data.states, data.shape.order), data)
    assert torch.equal(windows, data.windows)
    assert torch.equal(states, data.states)


@pytest.mark.parametrize("words", ["", ".kv", ".strided"])
def test_live_slots_hold_their_states_and_all_others_nan(words: str) -> None:
    pool, _, data = loaded(words)
    assert data.fresh.tolist() == [True, False, False]
    for index, layer in enumerate(pool.layers):
        conv, temporal = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
        for request in (1, 2):
            slot = int(data.slots[request])
            state = temporal[slot].mT if "kv" in words else temporal[slot]
            assert torch.equal(state, data.states[index, request])
            assert torch.equal(conv[slot], data.windows[index, request])
        others = [slot for slot in range(pool.num_slots) if slot not in data.slots[1:].tolist()]
        assert int(data.slots[0]) in others, "a fresh request's slot holds what a former owner left"
        assert bool(temporal[others].isnan().all())
        assert bool(conv[others].isnan().all())


def test_a_server_that_clears_slots_leaves_zeros_for_a_fresh_request() -> None:
    pool, _, data = loaded(".zeroed")
    slot, layer = int(data.slots[0]), pool.layers[1].layer_id
    assert not pool.temporal(layer)[slot].any()
    assert not pool.conv(layer)[slot].any()


def test_nothing_is_seen_where_nothing_was_written() -> None:
    _, watch, data = loaded()
    (slots, _, _), outside = seen(watch, [0, *data.slots.tolist()])
    assert not len(slots)
    assert not len(outside)


@pytest.mark.parametrize("words", ["", ".kv", ".strided"])
@pytest.mark.parametrize("part", ["conv", "temporal"])
def test_one_changed_bit_of_any_slot_is_seen(words: str, part: str) -> None:
    pool, watch, data = loaded(words)
    foreign = next(slot for slot in range(1, pool.num_slots) if slot not in data.slots)
    own = int(data.slots[1])
    for slot in (own, foreign):
        getattr(pool, part)(pool.layers[1].layer_id)[slot].view(-1)[-1] = 1.5
    (slots, raw, shape), outside = seen(watch, sorted([0, *data.slots.tolist()]))
    assert slots.tolist() == sorted([own, foreign])
    assert not len(outside)
    rows = torch.from_numpy(raw.copy()).view(shape)[:, 0, :, 0]
    windows, states = from_rows(rows, data)
    place = slots.tolist().index(own)
    got = windows[1, place].view(-1)[-1] if part == "conv" else states[1, place].reshape(-1)[-1]
    assert float(got) == 1.5


@pytest.mark.parametrize("words", ["", ".strided"])
def test_memory_between_tensors_is_watched(words: str) -> None:
    pool, watch, data = loaded(words)
    pool.memory[3] = 7
    (slots, _, _), outside = seen(watch, [0, *data.slots.tolist()])
    assert not len(slots)
    assert outside.tolist() == [3]


def test_at_capture_slot_0_is_zero_and_a_write_elsewhere_is_reported() -> None:
    pool, watch, _ = loaded()
    watch.clear()
    layer = pool.layers[0].layer_id
    assert not pool.temporal(layer)[0].any()
    assert bool(pool.temporal(layer)[1:].isnan().all())
    assert not len(watch.written_since_clear())
    pool.temporal(layer)[0] = 1.0
    pool.conv(layer)[4, 0, 0] = 1.0
    assert watch.written_since_clear().tolist() == [4]


def test_a_number_instead_of_nan_fills_slots_and_not_the_memory_between() -> None:
    pool, _watch, data = loaded(unowned=0.0)
    foreign = next(slot for slot in range(1, pool.num_slots) if slot not in data.slots)
    assert not pool.temporal(pool.layers[0].layer_id)[foreign].any()
    assert int(pool.memory[0]) == 0xFF


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_update_of_what_slots_of_nobody_hold_changes_its_bits(dtype: torch.dtype) -> None:
    number = torch.empty(4, 3, dtype=dtype).t()
    fill_with_signaling_nan(number)
    bits = number.view(torch.int32 if dtype is torch.float32 else torch.int16)
    before = bits.clone()
    assert bool(number.isnan().all())
    assert torch.equal(torch.where(torch.tensor(True), number, 0 * number).view(bits.dtype), before)
    number.mul_(0.5).add_(1)
    assert not bool((bits == before).any())
