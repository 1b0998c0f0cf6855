"""An index pool beyond 2^31 bytes: what is filled and looked at of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_testkit.runner_modes import indexing
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.errors import NoRoomError
from attn_testkit.runner_modes.harness import ServerHarness

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.steps.kv_groups import slot_map, slots_of_schedule
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.watches.spread_watch import slots_around
from attn_testkit_corpus.faults.indexer import IndexerParent
from cuda_on_cpu import emulated_cuda

CASE = "decode-mqa4-d128-bf16-p16-k25.69.1-shuffled-gauss-sel16-idx4-layers1from0-b4prod-bigpool"
SCHEDULE = make_schedule(parse_case(CASE))
PLACES = slot_map(SCHEDULE, 0)
STEP = SCHEDULE.steps[0]


@pytest.fixture
def server() -> Iterator[ServerHarness]:
    with torch.no_grad(), emulated_cuda():
        yield ServerHarness(IndexerParent, [SCHEDULE], torch.device("cuda"))


def scales(server: ServerHarness) -> torch.Tensor:
    assert server.context.index_pool is not None
    return server.context.index_pool.get_scales(0)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_pages_lie_at_both_ends_of_more_than_2_to_31_bytes_and_only_they_are_touched(server: ServerHarness) -> None:
    before = _resident()
    server.load(SCHEDULE, STEP)
    page = [int(place) // 64 for place in PLACES]
    half = (SCHEDULE.num_pages // 2 + 1) * 16
    assert page[half - 1] * 64 * 132 < 1 << 20
    assert page[half] * 64 * 132 > 1 << 31
    assert page[-1] == len(scales(server)) - 1
    assert _resident() - before < 1 << 28


def test_keys_of_requests_are_where_the_table_says_and_the_rest_is_nan(server: ServerHarness) -> None:
    server.load(SCHEDULE, STEP)
    held, owned = scales(server), set[int]()
    for request in STEP.requests:
        places = PLACES[request.slots[: request.prefix]].tolist()
        assert server.context.req_to_token[request.pool_row, : request.prefix].tolist() == places
        owned |= set(places)
    finite = {place for place in PLACES.tolist() if bool(held[place // 64, place % 64].isfinite())}
    assert finite == owned
    around = slots_around(PLACES, server.context.kv_pool.num_slots, 16)
    assert len(around) == 512
    assert all(bool(held[place // 64, place % 64].isnan()) for place in around.tolist())


def test_at_capture_the_first_page_is_zeros_and_the_rest_nan(server: ServerHarness) -> None:
    server.prepare_capture()
    held = scales(server)
    assert not held[0].any()
    assert all(bool(held[place // 64, place % 64].isnan()) for place in PLACES[64:].tolist())


def test_keys_of_a_step_are_seen_as_the_schedule_numbers_them_and_so_is_a_stray_one(server: ServerHarness) -> None:
    def changed() -> set[int]:
        assert server.index is not None
        ((held, size),) = server.index.look()
        places, _ = server.index.changes(held[:size].cpu().numpy())
        page, inside = divmod(places.raw.view("int64"), 64 * 132)
        return set((page * 64 + inside // 128)[inside < 64 * 128].tolist())

    run_eager(server, SCHEDULE, STEP, Clock())
    assert changed() == {int(request.slots[-1]) for request in STEP.requests}
    server.load(SCHEDULE, STEP)
    assert changed() == set()
    assert server.context.index_pool is not None
    stray, last = len(PLACES) - 1, int(PLACES[-1])
    server.context.index_pool.get_keys(0).view(torch.uint8)[last // 64, last % 64] = 0
    assert changed() == {stray}


def test_selected_slots_are_those_of_the_schedule_again() -> None:
    far = int(PLACES[-1])
    found = slots_of_schedule(SCHEDULE, torch.tensor([-1, 0, 17, far, far + 1, far - 5000, -7]))
    assert found.tolist() == [-1, 0, 17, len(PLACES) - 1, -2, -2, -7]
    usual = make_schedule(parse_case(CASE.replace("-bigpool", "")))
    assert slots_of_schedule(usual, torch.tensor([3, -1])).tolist() == [3, -1]


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 2 GiB", "can't allocate memory: 2 GB"])
def test_without_room_for_it_the_case_is_not_run_here(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def full(*arguments: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(indexing, "IndexPool", full)
    with torch.no_grad(), emulated_cuda():
        with pytest.raises(NoRoomError, match=r"for an index pool of more than 2\^31 bytes: .*memory"):
            ServerHarness(IndexerParent, [SCHEDULE], torch.device("cuda"))
        usual = make_schedule(parse_case(CASE.replace("-bigpool", "")))
        with pytest.raises(RuntimeError, match="memory"):
            ServerHarness(IndexerParent, [usual], torch.device("cuda"))


def test_the_reference_scores_slots_of_the_table_as_it_scores_the_whole_pool() -> None:
    schedule = make_schedule(parse_case(CASE.replace("-bigpool", "")))
    with torch.no_grad(), emulated_cuda():
        server = ServerHarness(TorchNativeSparseBackend, [schedule], torch.device("cuda"))
        server.load(schedule, schedule.steps[0])
        assert server.index is not None
        assert isinstance(server.backend, TorchNativeSparseBackend)
        q, weights, _ = server.index.rows(torch.arange(3, device="cuda"), 0)
        slots = torch.from_numpy(schedule.steps[0].requests[1].slots[:5]).to("cuda")
        layer = server.context.layers[0]
        every = server.backend.scores_of_slots(q, weights, layer)
        some = server.backend.scores_of_slots(q, weights, layer, slots)
        assert some.shape == (3, 5)
        assert torch.equal(every[:, slots].nan_to_num(7.0), some.nan_to_num(7.0))
        assert bool(some.isfinite().all())
