"""What the KV pool holds before a step, and what is said to have changed in it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.harness import ServerHarness

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import AttentionLayer, KVPool
from attn_testkit.steps.data import make_step_data, pool_image
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.watches.pool_watch import PoolWatch
from cuda_on_cpu import emulated_cuda

CUDA = torch.device("cuda")
CASES = [
    "decode-gqa2x2-d64-bf16-p16-k3.15.40-shuffled-gauss-b4prod",
    "decode-gqa2x2-d32-fp32-p4-k3.9.6-shared-gauss-b4prod",
    "draft-extend-gqa2x2-d32-fp16-p4-k3.9.6-n3a1.3.2-reversed-gauss-kvfp8e4m3-b4prod",
    "decode-mla16-d64r32-bf16-p4-k3.9.6-shuffled-gauss-b4prod",
]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def stored(pool: KVPool) -> torch.Tensor:
    """[L, 2 or 1, slots, H, D]: a view of all rows, for the layout that has one."""
    first = pool.get_key_buffer(0)
    parts = 1 if pool.one_row else 2
    return first.as_strided((2, parts, *first.shape), (parts * first.numel(), first.numel(), *first.stride()), 0)


def raw(pool: torch.Tensor) -> torch.Tensor:
    return pool.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("unowned", [math.nan, 0.0])
@pytest.mark.parametrize("case_id", CASES)
def test_before_a_step_the_pool_is_bit_for_bit_the_image_of_the_case(case_id: str, unowned: float) -> None:
    schedule = make_schedule(parse_case(case_id))
    harness = ServerHarness(TorchNativeBackend, [schedule], CUDA, unowned, declared=TorchNativeBackend.capabilities)
    for step in (*schedule.steps[:2], schedule.second, schedule.steps[0], schedule.steps[0]):
        harness.load(schedule, step)
        data = make_step_data(schedule, step)
        image = pool_image(schedule, step, data, False, after=step.stored, unowned=unowned)
        assert torch.equal(raw(stored(harness.context.kv_pool)), raw(image)), step.name
        stored(harness.context.kv_pool).view(torch.uint8).fill_(3)


@pytest.mark.parametrize("pattern", [None, "place.1.tail"])
def test_finite_page_tails_and_marked_places_are_filled_too(pattern: str | None) -> None:
    schedule = make_schedule(parse_case(CASES[2]))
    declared = TorchNativeBackend.capabilities.with_changes(needs={"finite_page_tails": frozenset({"fp8_e4m3"})})
    harness = ServerHarness(TorchNativeBackend, [schedule], CUDA, declared=declared)
    step = schedule.steps[0]
    harness.load(schedule, step, pattern)
    data = make_step_data(schedule, step, pattern)
    image = pool_image(schedule, step, data, True, after=False, marked=pattern or "")
    assert torch.equal(raw(stored(harness.context.kv_pool)), raw(image))


def test_slots_behind_those_of_a_smaller_schedule_hold_what_unowned_slots_hold() -> None:
    small, large = (make_schedule(parse_case(CASES[0].replace("k3.15.40", lens))) for lens in ("k3.15.40", "k3.15.200"))
    harness = ServerHarness(TorchNativeBackend, [large, small], CUDA, declared=TorchNativeBackend.capabilities)
    harness.load(large, large.steps[0])
    staged = harness.load(small, small.steps[0])
    assert staged.slots < harness.context.kv_pool.num_slots
    assert stored(harness.context.kv_pool)[:, :, staged.slots :].isnan().all()


def filled(width: int = 8, dtype: torch.dtype = torch.bfloat16) -> tuple[KVPool, PoolWatch]:
    """12 slots of 4 a page, 0 in slots 4 and 9, NaN elsewhere."""
    layers = tuple(AttentionLayer(i, 2, 1, width, width, 1.0) for i in (0, 1))
    pool = KVPool(8, 4, layers, dtype, CUDA)
    watch = PoolWatch(pool)
    watch.fill("first", lambda: (np.array([4, 9]), np.zeros(2 * 2 * 2 * width * dtype.itemsize, np.uint8)), math.nan)
    return pool, watch


def written(watch: PoolWatch, due: list[int], slots: int = 12) -> tuple[list[int], torch.Tensor]:
    look = watch.look(slots, torch.tensor(due, device=CUDA), len(due))
    assert [each.numel() for each, _ in look] == [size for _, size in look]
    found, held, shape = watch.written(np.array(due), [each.cpu().numpy() for each, _ in look])
    return found.tolist(), torch.from_numpy(held).view(watch.bits).view(shape)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("place", [(0, 0), (1, 1), (1, 0)])
def test_one_changed_byte_is_found_in_every_layer_part_slot_and_width(
    width: int, dtype: torch.dtype, place: tuple[int, int]
) -> None:
    pool, watch = filled(width, dtype)
    assert written(watch, [0, 9])[0] == []
    for slot in (0, 11):
        stored(pool).view(torch.uint8)[(*place, slot, 0, width * dtype.itemsize - 1)] ^= 1
    slots, rows = written(watch, [0, 9, 11])
    assert slots == [0, 11]
    assert torch.equal(rows, stored(pool).view(watch.bits)[:, :, [0, 11]].cpu())


def test_slots_that_were_not_due_are_brought_too() -> None:
    pool, watch = filled()
    stored(pool)[1, 0, 5, 0, 3] = 2.0
    stored(pool)[0, 1, 9] = 4.0
    assert written(watch, [9])[0] == [5, 9]
    slots, rows = written(watch, [0, 9])
    assert slots == [5, 9]
    assert torch.equal(rows, stored(pool).view(torch.int16)[:, :, [5, 9]].cpu())


def test_slots_that_were_due_and_did_not_change_are_left_out() -> None:
    pool, watch = filled()
    stored(pool)[:, :, 9] = 4.0
    slots, rows = written(watch, [0, 4, 9, 10])
    assert slots == [9]
    assert rows.view(torch.bfloat16).eq(4.0).all()


@pytest.mark.parametrize(("looked_at", "found"), [(11, []), (12, [11])])
def test_slots_behind_those_that_a_schedule_uses_are_not_looked_at(looked_at: int, found: list[int]) -> None:
    pool, watch = filled()
    stored(pool)[0, 0, 11] = 1.0
    assert written(watch, [0], looked_at)[0] == found


def test_minus_zero_and_another_nan_are_changes() -> None:
    pool, watch = filled()
    stored(pool)[0, 0, 4, 0, 0] = -0.0
    stored(pool).view(torch.int16)[0, 0, 5, 0, 0] = -1
    assert written(watch, [4, 5])[0] == [4, 5]


def test_the_same_content_is_not_asked_for_twice_and_is_put_back() -> None:
    pool, watch = filled()
    stored(pool).zero_()

    def never() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        raise AssertionError("it is on the device")

    watch.fill("first", never, math.nan)
    assert stored(pool)[:, :, [4, 9]].eq(0).all()
    assert stored(pool)[:, :, [0, 5, 11]].isnan().all()
    watch.fill("second", lambda: (np.array([3]), np.zeros(2 * 2 * 8 * 2, np.uint8)), 1.0)
    assert stored(pool)[:, :, 3].eq(0).all()
    assert stored(pool)[:, :, [0, 4, 9]].eq(1).all()
    watch.fill("nobody has a key", lambda: (np.zeros(0, np.int64), np.zeros(0, np.uint8)), 2.0)
    assert stored(pool).eq(2).all()
    with pytest.raises(AssertionError, match="it is on the device"):
        watch.fill("first", never, math.nan)
