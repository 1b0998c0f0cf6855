"""Triton kernels that store outside of the memory that they were given, or load far from it."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest
import torch

from cuda_on_cpu import emulated_cuda, triton_bounds
from cuda_on_cpu.errors import StrayAccessError

pytest.importorskip("triton")

from emulation_kernels import copy_from, count_at, read_row, store_at, store_through_table, store_tile, store_where


@pytest.fixture(autouse=True)
def device():
    with emulated_cuda():
        yield


def test_a_tile_may_end_where_the_memory_ends_and_not_behind():
    out = torch.zeros(48, device="cuda")
    store_tile[(3,)](out, 16)
    assert out.tolist() == list(range(48))
    with pytest.raises(StrayAccessError, match=r"store_tile .*up to 4 bytes past the end of out, float32 \[47\]"):
        store_tile[(3,)](torch.zeros(47, device="cuda"), 16)


@pytest.mark.parametrize(
    ("place", "error"), [(0, ""), (5, ""), (6, "4 bytes past the end of"), (-1, "4 bytes before the start of")]
)
def test_the_first_and_the_last_element_are_within(place, error):
    out = torch.zeros(6, dtype=torch.int32, device="cuda")
    if error:
        with pytest.raises(StrayAccessError, match=f"up to {error} out, int32 "):
            store_at[(1,)](out, place)
        with pytest.raises(StrayAccessError, match=f"up to {error} out, int32 "):
            count_at[(1,)](out, place)
    else:
        store_at[(1,)](out, place)
        count_at[(1,)](out, place)
        assert out[place].item() == 8


def test_the_rest_of_a_larger_tensor_is_memory_that_was_given():
    whole = torch.zeros(8, dtype=torch.int32, device="cuda")
    store_at[(1,)](whole[2:4], -2)
    assert whole.tolist() == [7, 0, 0, 0, 0, 0, 0, 0]


def test_a_store_that_a_mask_leaves_out_goes_nowhere():
    out = torch.zeros(6, dtype=torch.int32, device="cuda")
    store_at[(1,)](out, 6, 0)
    assert out.tolist() == [0] * 6


def test_memory_behind_an_address_that_was_a_number_is_anybodys():
    target = torch.zeros(4, device="cuda")
    table = torch.tensor([target.data_ptr()]).to("cuda")
    for _ in range(3):  # noted down, and walked
        store_through_table[(2,)](table)
    assert target.tolist() == [1.0] * 4


def test_it_is_reported_at_a_replay_too():
    out, place = torch.zeros(6, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    store_where[(1,)](out, place)
    with torch.cuda.graph(graph):
        store_where[(1,)](out, place)
    place.fill_(1 << 20)
    with pytest.raises(StrayAccessError, match="store_where"):
        graph.replay()


def test_the_error_travels_between_processes():
    with pytest.raises(StrayAccessError) as raised:
        store_at[(1,)](torch.zeros(6, dtype=torch.int32, device="cuda"), 6)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("look", [triton_bounds.look_at_load, triton_bounds.look_at_store], ids=["load", "store"])
@pytest.mark.parametrize(("bytes_off", "raises"), [(0, False), (4, True)])
def test_the_last_element_of_the_storage_is_the_last_that_may_be_used(look, bytes_off, raises):
    x, out = torch.zeros(1 << 20, device="cuda"), torch.zeros(1, device="cuda")
    inside = x[(1 << 19) : (1 << 19) + 4]
    end = inside.untyped_storage().data_ptr() + inside.untyped_storage().nbytes()
    parts = (np.array([end + bytes_off - 4]),)
    expected = pytest.raises(StrayAccessError, match=r"of triton kernel k .* up to 4 bytes past")
    with (
        triton_bounds.looking_at_accesses("k", {"x": inside, "out": out}),
        expected if raises else contextlib.nullcontext(),
    ):
        look(parts, 4, inside.data_ptr())


def test_memory_of_another_argument_is_out_of_bounds_too():
    """A bad row of the pool may lie in the table that lies behind it."""
    x = torch.zeros(64, device="cuda")
    pool, table = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    expected = pytest.raises(StrayAccessError, match=r"of pool, float32 \[8\]: other")
    with triton_bounds.looking_at_accesses("k", {"pool": pool, "table": table, "x": x}), expected:
        triton_bounds.look_at_load((np.array([table.data_ptr()]),), 4, pool.data_ptr())


def test_an_offset_in_32_bits_is_reported_and_does_not_end_the_process():
    pool, out = torch.empty((1 << 31) + 4096, dtype=torch.uint8, device="cuda"), torch.zeros(1, device="cuda")
    slots = torch.tensor([1 << 19], dtype=torch.int32, device="cuda")
    with pytest.raises(StrayAccessError, match=r"load of triton kernel read_row .* before the start of pool, uint8 "):
        read_row[(1,)](pool, slots, out, 4096)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_tensor_that_is_named_is_the_one_whose_pointer_was_used(rows: int) -> None:
    """A wrong offset into a table leads past other tensors, and the last of them is not at fault."""
    table, out = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    copy_from[(1,)](table, out, 2, rows)
    away = 1 << 22 if out.data_ptr() > table.data_ptr() else -(1 << 22)
    distance = (out.data_ptr() + away - table.data_ptr()) // 4
    with pytest.raises(StrayAccessError, match=r"bytes (past the end|before the start) of table, float32 \[8\]: other"):
        copy_from[(1,)](table, out, distance, rows)


def test_a_tensor_that_only_lies_nearest_is_called_so() -> None:
    out = torch.zeros(6, dtype=torch.int32, device="cuda")
    parts = (np.array([out.data_ptr() + (1 << 22)]),)
    with triton_bounds.looking_at_accesses("k", {"out": out}):
        with pytest.raises(StrayAccessError, match=r"of out, int32 \[6\], the nearest tensor"):
            triton_bounds.look_at_load(parts, 4)
        with pytest.raises(StrayAccessError, match=r"of out, int32 \[6\]: other"):
            triton_bounds.look_at_load(parts, 4, out.data_ptr())
