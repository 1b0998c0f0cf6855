"""What a backend is given where layers have KV groups, and what is seen of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.graphs import run_graphs
from attn_testkit.runner_modes.harness import ServerHarness, StagedStep
from attn_testkit.runner_modes.options import RunOptions

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks.comparison import Comparison
from attn_testkit.contract import KV_LAYOUTS, ForwardBatch, KVGroup, Unsupported, refuse_undeclared
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import make_step_data, pool_image
from attn_testkit.steps.kv_groups import slot_map, table_of_group
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import emulated_cuda

CASE = "decode-gqa2x2-d32-bf16-p4-k19.40.6-shuffled-gauss-w7-layers3from5groups-b4prod"
ALONE = CASE.replace("groups", "")
CUDA = torch.device("cuda")
SCHEDULE = make_schedule(parse_case(CASE))
STEP = SCHEDULE.steps[0]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def staged(case: str = CASE) -> tuple[ServerHarness, StagedStep]:
    schedule = make_schedule(parse_case(case))
    harness = ServerHarness(TorchNativeBackend, [schedule], CUDA)
    return harness, harness.load(schedule, schedule.steps[0])


def stored(group: KVGroup) -> torch.Tensor:
    """[L, 2, slots, Hk, D], a copy on the host."""
    return torch.stack([torch.stack(group.kv_pool.get_kv_buffer(layer)) for layer in group.layer_ids]).cpu()


def found_in(harness: ServerHarness, held: StagedStep) -> list[np.ndarray]:
    look = harness.pool.look(held.slots, held.due_on_device[0], len(held.due[0]))
    return [raw[:size].cpu().numpy() for raw, size in look]


def looked(harness: ServerHarness, held: StagedStep) -> tuple[np.ndarray, torch.Tensor]:
    """Slots of the schedule that changed, and what all layers hold there."""
    slots, raw, shape = harness.pool.written(held.due[0], found_in(harness, held))
    return slots, torch.from_numpy(raw).view(torch.bfloat16).view(shape)


def test_each_group_has_a_pool_of_its_layers_and_a_table_of_its_slots() -> None:
    harness, _ = staged()
    context = harness.context
    assert [group.layer_ids for group in context.groups] == [(5, 7), (6,)]
    assert context.kv_groups == context.groups
    assert context.kv_pool is context.groups[0].kv_pool
    assert [context.group_of(layer).index for layer in context.layers] == [0, 1, 0]
    for group in context.groups:
        table = group.req_to_token.cpu().numpy()
        assert not table[0].any()
        named = table_of_group(SCHEDULE, STEP, context.layers[group.index].sliding_window_size)
        for request in STEP.requests:
            want = slot_map(SCHEDULE, group.index)[named[request.pool_row, : len(request.slots)]]
            assert np.array_equal(table[request.pool_row, : len(want)], want)
            last = slot_map(SCHEDULE, group.index)[request.slots[-1]]
            assert table[request.pool_row, len(request.slots) - 1] == last
    with pytest.raises(KeyError, match="no KV group has a layer of id 9"):
        context.group_of(replace(context.layers[0], layer_id=9))


def test_each_pool_holds_the_image_of_its_layers_by_its_own_slots() -> None:
    harness, _ = staged()
    image = pool_image(SCHEDULE, STEP, make_step_data(SCHEDULE, STEP), False, after=False)
    for group in harness.context.groups:
        held = stored(group)[:, :, torch.from_numpy(slot_map(SCHEDULE, group.index))]
        assert torch.equal(held.view(torch.int16), image[group.index :: 2].contiguous().view(torch.int16))


def test_without_groups_there_is_one_of_all_layers() -> None:
    harness, _ = staged(ALONE)
    context = harness.context
    (group,) = context.groups
    assert context.kv_groups == ()
    assert group.kv_pool is context.kv_pool
    assert group.req_to_token is context.req_to_token
    assert group.layer_ids == (5, 6, 7)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("own", [True, False])
def test_what_is_written_is_seen_under_the_slots_of_the_schedule(group: int, own: bool) -> None:
    """A slot that changed in one group alone has the rows of all layers."""
    harness, held = staged()
    slot = int(held.due[0][1]) if own else int(next(s for s in range(4, held.slots) if s not in held.due[0]))
    before = [stored(each) for each in harness.context.groups]
    of = harness.context.groups[group]
    of.kv_pool.get_value_buffer(of.layer_ids[0])[slot_map(SCHEDULE, group)[slot], 1, 3] = 2.5
    slots, rows = looked(harness, held)
    assert slots.tolist() == [slot]
    assert rows[group, 1, 0, 1, 3] == 2.5
    rows[group, 1, 0, 1, 3] = before[group][0, 1, slot_map(SCHEDULE, group)[slot], 1, 3]
    want = torch.stack([before[g][i, :, slot_map(SCHEDULE, g)[slot]] for g, i in ((0, 0), (1, 0), (0, 1))])
    assert torch.equal(rows[:, :, 0].contiguous().view(torch.int16), want.view(torch.int16))


class Keeps(TorchNativeBackend):
    batches: list[ForwardBatch]

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.batches = [*getattr(self, "batches", []), batch]
        super().init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        locs = [group.cache_loc(batch) for group in self.context.groups]
        assert not in_capture or not any(each.any() for each in locs)
        assert all(each.is_contiguous() and len(each) == len(batch.out_cache_loc) for each in locs)
        self.places = {*getattr(self, "places", ()), tuple(each.data_ptr() for each in locs)}


def test_new_tokens_have_a_slot_in_each_group() -> None:
    harness = ServerHarness(Keeps, [SCHEDULE], CUDA)
    run_eager(harness, SCHEDULE, STEP, Clock())
    assert isinstance(harness.backend, Keeps)
    batch = harness.backend.batches[0]
    assert batch.group_cache_locs is not None
    for group in harness.context.groups:
        want = slot_map(SCHEDULE, group.index)[make_step_data(SCHEDULE, STEP).out_cache_loc.numpy()]
        assert group.cache_loc(batch).tolist() == want.tolist()
    assert torch.equal(batch.out_cache_loc, batch.group_cache_locs[0])


def test_in_a_graph_slots_of_each_group_lie_in_one_place_and_padding_has_slot_0() -> None:
    harness = ServerHarness(Keeps, [SCHEDULE], CUDA)
    run_graphs(harness, [SCHEDULE], Clock(), RunOptions(eager_steps=False))
    assert isinstance(harness.backend, Keeps)
    ((first, second),) = harness.backend.places
    assert first != second


class Grouped(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(
        kv_pool={"kv_groups": True, "page_sizes": {4}}, heads={"head_dims": {32}}
    )


def test_a_kernel_backend_needs_nothing_for_groups_but_the_capability() -> None:
    schedule = make_schedule(parse_case(CASE.replace("-w7", "")))
    harness = ServerHarness(Grouped, [schedule], CUDA)
    run = run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    found = [run_eager(harness, schedule, schedule.steps[0], Clock()), *(seen for _, seen in run.observed)]
    assert len(found) == len(schedule.steps) + 1
    assert all(Comparison(observed, expect(schedule, observed.step)).right for observed in found)


LAYOUTS = [name for name in KV_LAYOUTS if name != "custom"]
WORDS = {name: "" if name == "nhd" else "-kv" + name.removeprefix("kv").replace("-", "") for name in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_of_groups_have_the_layout_of_the_case_and_are_right_in_it(layout: str) -> None:
    schedule = make_schedule(parse_case(CASE.replace("-w7", f"{WORDS[layout]}-w7")))
    harness = ServerHarness(TorchNativeBackend, [schedule], CUDA)
    assert [group.kv_pool.layout for group in harness.context.groups] == [layout] * 2
    run = run_graphs(harness, [schedule], Clock(), RunOptions(eager_steps=False))
    assert all(Comparison(observed, expect(schedule, observed.step)).right for _, observed in run.observed)
    assert not any(observed.outside for _, observed in run.observed)


@pytest.mark.parametrize("index", [0, 1])
def test_what_changes_behind_the_pages_of_any_group_is_seen(index: int) -> None:
    harness, held = staged(CASE.replace("-w7", f"{WORDS['padded-pages']}-w7"))
    pool = harness.context.groups[index].kv_pool
    places = harness.pool.outside(found_in(harness, held))
    assert len(places) == 0
    flat = pool.memory[pool.layers[0].layer_id].key
    page = pool.page_size * pool.layers[0].tp_k_head_num * pool.layers[0].head_dim
    assert flat.stride(0) > page
    flat.as_strided((1,), (1,), flat.storage_offset() + page).fill_(1.0)
    places = harness.pool.outside(found_in(harness, held))
    assert places.tolist() == [page * pool.dtype.itemsize]
    assert not len(harness.pool.written(held.due[0], found_in(harness, held))[0])


def test_at_capture_page_0_of_each_group_is_zero_and_all_else_is_nan() -> None:
    harness, _ = staged()
    harness.prepare_capture()
    for group in harness.context.groups:
        assert not stored(group)[:, :, :4].any()
        assert stored(group)[:, :, 4:].isnan().all()


def test_a_context_of_two_groups_is_refused_without_the_capability() -> None:
    harness, _ = staged()
    declared = TorchNativeBackend.capabilities
    refuse_undeclared(declared, harness.context)
    with pytest.raises(Unsupported, match="number of KV groups 2 is not declared"):
        refuse_undeclared(declared.with_changes(kv_pool={"kv_groups": False}), harness.context)
