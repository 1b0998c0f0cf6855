"""A KV pool beyond 2^31 elements: what is filled and looked at of it, and a machine that has no room for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes import harness as harness_module
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import NoRoomError
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.messages import RunCase

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparsePackedPagesBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import Execution
from attn_testkit.environment import resolve
from attn_testkit.examples import MinimalBackend
from attn_testkit.running.case_runs.case_run import run_case
from attn_testkit.steps.kv_groups import slot_map
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.watches.spread_watch import slots_around
from cuda_on_cpu import emulated_cuda

CASE = "decode-gqa2x2-d64-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool"
SCHEDULE = make_schedule(parse_case(CASE))
PLACES = slot_map(SCHEDULE, 0)
STEP = SCHEDULE.steps[0]


@pytest.fixture
def server() -> Iterator[ServerHarness]:
    with torch.no_grad(), emulated_cuda():
        yield ServerHarness(MinimalBackend, [SCHEDULE], torch.device("cuda"))


def keys(server: ServerHarness) -> torch.Tensor:
    return server.context.kv_pool.get_key_buffer(0)


def test_the_pool_has_more_elements_than_32_bits_count_and_only_its_slots_are_touched(server: ServerHarness) -> None:
    before = _resident()
    server.load(SCHEDULE, STEP)
    pool = keys(server)
    assert pool.numel() > 2**31
    assert int(PLACES[-1]) == len(pool) - 1
    assert _resident() - before < 1 << 28


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_requests_have_their_keys_at_the_places_that_the_table_says_and_all_else_is_nan(server: ServerHarness) -> None:
    staged = server.load(SCHEDULE, STEP)
    pool, table = keys(server), server.context.req_to_token
    owned = set[int]()
    for index, request in enumerate(STEP.requests):
        places = PLACES[request.slots[: request.prefix]]
        assert table[request.pool_row, : request.prefix].tolist() == places.tolist()
        assert torch.equal(pool[torch.from_numpy(places)].cpu(), staged.data.stored_keys[0, index, : request.prefix])
        owned |= set(places.tolist())
    free = torch.tensor([place for place in PLACES.tolist() if place not in owned])
    assert bool(pool[free].isnan().all())


def test_scales_after_the_numbers_of_a_page_are_filled_and_watched_with_their_row() -> None:
    schedule = make_schedule(
        parse_case("decode-mla2-d128-bf16-p16-k9.37.1-shuffled-gauss-kvfp8dsmlav4-sel16-layers1from0-b4prod-bigpool")
    )
    step, places = schedule.steps[0], torch.from_numpy(slot_map(schedule, 0))
    with torch.no_grad(), emulated_cuda():
        server = ServerHarness(TorchNativeSparsePackedPagesBackend, [schedule], torch.device("cuda"))
        staged, pool = server.load(schedule, step), server.context.kv_pool
        numbers, scales = pool.get_kv_pages(0)[0], pool.get_scale_pages(0)[0]
        for index, request in enumerate(step.requests):
            at = places[request.slots[: request.prefix]]
            held = torch.cat((numbers[at // 16, at % 16], scales[at // 16, at % 16]), -1).cpu()
            assert torch.equal(held, staged.data.stored_keys[0, index, : request.prefix])
        slot = int(step.requests[1].slots[0])
        scales[places[slot] // 16, places[slot] % 16, 0, 0] ^= 1
        found = [part.cpu().numpy() for part, _ in server.pool.look(len(places), torch.tensor([slot]), 1)]
        changed, rows, shape = server.pool.written(torch.tensor([slot]).numpy(), found)
    assert changed.tolist() == [slot]
    want = staged.data.stored_keys[0, 1, 0].clone()
    want[0, 192] ^= 1
    assert torch.equal(torch.from_numpy(rows.copy()).view(shape)[0, 0, 0], want)


def test_new_rows_lie_where_out_cache_loc_says_and_a_stray_one_is_seen(server: ServerHarness) -> None:
    seen = run_eager(server, SCHEDULE, STEP, Clock())
    new = sorted(int(request.slots[-1]) for request in STEP.requests)
    assert seen.written[0].tolist() == new
    server.load(SCHEDULE, STEP)
    stray = len(PLACES) - 1
    keys(server)[int(PLACES[stray])] = 1.0
    changed, *_ = server.pool.look(len(PLACES), torch.tensor([0]), 1)
    found, rows, shape = server.pool.written(torch.tensor([0]).numpy(), [changed[0].cpu().numpy()])
    assert (found.tolist(), shape) == ([stray], (1, 2, 1, 2, 64))
    assert torch.from_numpy(rows).view(torch.bfloat16)[:128].tolist() == [1.0] * 128
    assert server.written_at_capture()[-1] == stray


def test_a_tile_before_and_behind_the_slots_of_a_schedule_is_nan_and_a_write_to_it_is_seen(
    server: ServerHarness,
) -> None:
    pool, half = keys(server), len(PLACES) // 2
    around = slots_around(PLACES, len(pool), 16)
    used = sorted(set((PLACES // 16).tolist()))
    gap = next(at for at, (one, other) in enumerate(pairwise(used)) if other > one + 1)
    first, last = (used[gap] + 1) * 16, used[gap + 1] * 16 - 1
    assert around.tolist() == [*range(first, first + 256), *range(last - 255, last + 1)]
    assert abs(gap - half // 16) <= 1
    server.load(SCHEDULE, STEP)
    assert bool(pool[torch.from_numpy(around)].isnan().all())
    looked = server.pool.look(len(PLACES), torch.tensor([0]), 1)
    assert server.pool.outside([each.cpu().numpy() for each, _ in looked]).tolist() == []
    pool[int(around[300]), 1, 5] = 1.0
    looked = server.pool.look(len(PLACES), torch.tensor([0]), 1)
    assert server.pool.outside([each.cpu().numpy() for each, _ in looked]).tolist() == [int(around[300]) * 2 * 64 * 2]


def test_at_capture_page_0_is_zeros_and_the_rest_nan(server: ServerHarness) -> None:
    server.prepare_capture()
    pool = keys(server)
    assert not pool[:16].any()
    assert bool(pool[torch.from_numpy(PLACES[16:])].isnan().all())
    assert server.written_at_capture() == ()


@pytest.mark.parametrize("unowned", [math.nan, 0.0])
def test_slots_of_nobody_hold_what_is_asked_for_in_fp8_too(unowned: float) -> None:
    schedule = make_schedule(parse_case(CASE.replace("gauss", "gauss-kvfp8e4m3")))
    with torch.no_grad(), emulated_cuda():
        server = ServerHarness(TorchNativeBackend, [schedule], torch.device("cuda"), unowned=unowned)
        server.load(schedule, schedule.steps[0])
        places = slot_map(schedule, 0)
        free = keys(server).view(torch.uint8)[int(places[0])]
    assert set(free.flatten().tolist()) == {0xFF if math.isnan(unowned) else 0}


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 8 GiB", "can't allocate memory: 8 GB"])
def test_without_room_for_it_the_case_is_not_run_here(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def full(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError(words)

    monkeypatch.setattr(harness_module, "KVPool", full)
    environment = resolve("cpu")
    with torch.no_grad(), emulated_cuda(), pytest.raises(NoRoomError, match=r"2\^31 elements: .*memory"):
        ServerHarness(MinimalBackend, [SCHEDULE], torch.device("cuda"))
    record = run_case(MinimalBackend, RunCase(CASE, Execution.EAGER), environment, MinimalBackend.capabilities)
    assert words in record.not_here
    assert not record.findings
    usual = CASE.replace("-bigpool", "")
    record = run_case(MinimalBackend, RunCase(usual, Execution.EAGER), environment, MinimalBackend.capabilities)
    assert not record.not_here
    assert [finding.check for finding in record.findings] == ["completes"]


class CopiesThePool(MinimalBackend):
    """Right, and slow: it reads a copy of all keys."""

    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.copy = self.context.kv_pool.get_key_buffer(0).clone()
        return super().forward(*arguments, **named)


@pytest.mark.parametrize("execution", Execution)
def test_a_backend_that_copies_the_pool_is_not_run_and_takes_no_memory_of_the_machine(execution: Execution) -> None:
    before = _resident()
    record = run_case(CopiesThePool, RunCase(CASE, execution), resolve("cpu"), CopiesThePool.capabilities)
    assert record.not_here.startswith("no room in addition to a KV pool of more than 2^31 elements: ")
    assert not record.findings
    assert _resident() - before < 1 << 29
    torch.empty(6 << 30, dtype=torch.uint8)  # there is no limit any more


def test_memory_that_a_backend_lacks_elsewhere_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(MinimalBackend, "forward", refused)
    usual = CASE.replace("-bigpool", "")
    declared = MinimalBackend.capabilities
    record = run_case(MinimalBackend, RunCase(usual, Execution.EAGER), resolve("cpu"), declared)
    assert not record.not_here
    assert [finding.check for finding in record.findings] == ["completes"]
