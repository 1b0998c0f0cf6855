"""Tensors that go to the device side by side: where they lie, what lies between them, and what is said of a write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from attn_testkit.runner_modes.batches import batch_on_device, spec_on_device
from attn_testkit.runner_modes.tables import Tables

from attn_testkit.contract import ForwardBatch, ForwardMode, VerifyInput
from attn_testkit.watches.packing import pack_places, send, sent_alone
from cuda_on_cpu import StrayAccessError, emulated_cuda

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


@pytest.mark.parametrize(
    ("elements", "second"), [(1, 512), (56, 512), (57, 1024), (64, 1024), (120, 1024), (121, 1536)]
)
def test_each_tensor_begins_where_an_allocator_would_have_it_and_64_bytes_behind_the_last(
    elements: int, second: int
) -> None:
    packing = pack_places((("a", torch.int64, (elements,)), ("b", torch.int32, (2, 3))))
    assert [place.start for place in packing.places] == [0, second]
    assert packing.size == second + 512
    assert packing.places[1].end == second + 24


def test_what_lies_between_is_poison_on_both_sides_of_the_transfer() -> None:
    ids, lens = torch.arange(3), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    tensors, sent = send({"ids": ids, "lens": lens}, CUDA)
    assert all(tensor.is_cuda for tensor in tensors.values())
    assert torch.equal(tensors["ids"].cpu(), ids)
    assert torch.equal(tensors["lens"].cpu(), lens)
    assert tensors["ids"].dtype == torch.int64
    whole = sent.memory.cpu()  # type: ignore[union-attr]
    assert np.array_equal(whole.numpy(), sent.before)
    assert set(sent.before[24:512].tolist()) == set(sent.before[528:].tolist()) == {0xFF}


def test_a_strided_tensor_arrives_as_its_elements() -> None:
    strided = torch.arange(12).view(3, 4)[:, ::2]
    assert torch.equal(send({"x": strided}, CUDA)[0]["x"].cpu(), strided)


def test_a_write_is_said_of_the_tensor_that_it_hit_and_of_no_other() -> None:
    tensors, sent = send({"a": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(2)}, CUDA)
    assert list(sent.changed(sent.memory.cpu().numpy())) == []  # type: ignore[union-attr]
    tensors["b"][1] = -0.0
    ((place, was, is_),) = sent.changed(sent.memory.cpu().numpy())  # type: ignore[union-attr]
    assert (place.name, was.view(np.float32).tolist()) == ("b", [0.0, 0.0])
    assert is_.view(np.int32).tolist() == [0, -(2**31)]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_tensor_with_memory_of_its_own_is_watched_where_it_is(on_device: bool) -> None:
    tensor = torch.tensor([1, 2], device=CUDA if on_device else "cpu")
    sent = sent_alone("lens", tensor, np.array([1, 2]).view(np.uint8))
    assert isinstance(sent.memory, torch.Tensor) is on_device
    tensor[1] = 3
    now = sent.memory.cpu().numpy() if isinstance(sent.memory, torch.Tensor) else sent.memory
    ((place, _, is_),) = sent.changed(now)
    assert (place.name, is_.view(np.int64).tolist()) == ("lens", [1, 3])


def verify_batch() -> ForwardBatch:
    rows, lens = torch.arange(4), torch.tensor([5, 6])
    spec = VerifyInput(rows, torch.ones(10, dtype=torch.bool), rows, rows.view(2, 2), rows.view(2, 2), rows.view(2, 2),
                       1, 1, 2, 2, seq_lens_cpu=lens)  # fmt: skip
    return ForwardBatch(
        ForwardMode.TARGET_VERIFY, 2, rows, lens, lens, rows, rows, seq_lens_cpu=lens.clone(), seq_lens_sum=11,
        spec_info=spec,
    )  # fmt: skip


def test_a_batch_goes_to_the_device_but_for_what_is_for_the_host() -> None:
    before = verify_batch()
    batch, _ = batch_on_device(before, CUDA)
    assert isinstance(batch.spec_info, VerifyInput)
    for owner, was in ((batch, before), (batch.spec_info, before.spec_info)):
        for name, tensor in vars(owner).items():
            if isinstance(tensor, torch.Tensor):
                assert tensor.is_cuda is not name.endswith("_cpu"), name
                assert torch.equal(tensor.cpu(), getattr(was, name)), name
    assert (batch.seq_lens_sum, batch.batch_size) == (11, 2)
    assert not before.input_ids.is_cuda, "a copy"


def test_a_step_has_memory_of_its_own_and_its_mask_too() -> None:
    (first, _), (second, _) = batch_on_device(verify_batch(), CUDA), batch_on_device(verify_batch(), CUDA)
    assert isinstance(first.spec_info, VerifyInput)
    assert first.spec_info.custom_mask is not None
    memory = [tensor.untyped_storage().data_ptr() for tensor in (first.seq_lens, second.seq_lens)]
    assert memory[0] != memory[1]
    assert first.spec_info.custom_mask.untyped_storage().data_ptr() not in memory
    moved = spec_on_device(verify_batch().spec_info, CUDA)  # type: ignore[type-var]
    assert moved.positions.is_cuda


@pytest.mark.parametrize(
    ("name", "said"),
    [("seq_lens", True), ("seq_lens_cpu", True), ("spec_info.positions", True), ("spec_info.custom_mask", True),
     ("spec_info.retrieve_index", False)],
)  # fmt: skip
def test_of_a_batch_what_a_server_goes_on_using_is_watched(name: str, said: bool) -> None:
    batch, given = batch_on_device(verify_batch(), CUDA)
    owner, _, field = name.rpartition(".")
    tensor = getattr(getattr(batch, owner) if owner else batch, field)
    tensor.view(-1)[0] = 0 if tensor.view(-1)[0] else 1
    found = [
        place.name
        for sent in given
        for place, _, _ in sent.changed(
            sent.memory.cpu().numpy() if isinstance(sent.memory, torch.Tensor) else sent.memory
        )
    ]
    assert found == ([f"batch.{name}"] if said else [])


def test_tables_keep_what_a_step_does_not_fill() -> None:
    tables = Tables(1, 3, 4, rows=2, token=(2, 2), dtype=torch.bfloat16, device=CUDA)
    assert tables.rows.shape == (3, 2, 2)
    assert tables.rows[:-1].eq(0.5).all()
    assert tables.hidden[:-1].eq(0.5).all()
    assert tables.rows[-1].isnan().all()
    assert tables.hidden[-1].isnan().all()
    hidden, rows = torch.full((1, tables.hidden.shape[1]), 2.0), torch.full((1, 2, 2), 3.0, dtype=torch.bfloat16)
    filled = np.array([[[0, 0], [7, 8]]], np.int32), np.array([0, 5])
    raw = hidden.numpy(), rows.view(torch.uint8).numpy().reshape(-1)
    sent, due = tables.fill(*filled, *raw)
    assert tables.req_to_token.tolist() == [[[0, 0, 0, 0], [7, 8, 0, 0], [0, 0, 0, 0]]]
    assert due.tolist() == [0, 5]
    assert tables.rows[:, 0, 0].tolist()[:2] == [3.0, 0.5]
    assert tables.hidden[:, 0].tolist()[:2] == [2.0, 0.5]
    assert tables.rows[-1].isnan().all()
    assert tables.hidden[-1].isnan().all()
    tables.req_to_token[0, 2, 3] = 9
    ((place, _, _),) = sent.changed(sent.memory.cpu().numpy())  # type: ignore[union-attr]
    assert place.name == "req_to_token"
    tables.fill(np.array([[[0, 0, 0, 6]]], np.int32), filled[1], *raw)
    assert tables.req_to_token.tolist() == [[[0, 0, 0, 6], [7, 8, 0, 0], [0, 0, 0, 0]]], "the rest is as it was sent"
    tables.clear_requests()
    assert not tables.req_to_token.any()
    tables.fill(np.array([[[1]]], np.int32), filled[1], *raw)
    assert tables.req_to_token.sum() == 1


@pytest.mark.parametrize("name", ["seq_lens", "batch.extend_start_loc", "batch.spec_info.num_accept_tokens"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_behind_lengths_and_offsets_a_tile_finds_numbers_that_lead_somewhere(name: str, dtype: torch.dtype) -> None:
    tensors, sent = send({name: torch.arange(3).to(dtype), "out_cache_loc": torch.arange(2)}, CUDA)
    behind = tensors[name].as_strided((64,), (1,))[3:].cpu()
    assert behind.tolist() == [2, 1_000_003] * 30 + [2], "a small number, and one beyond all rows and keys"
    slots = tensors["out_cache_loc"].as_strided((8,), (1,))[2:].cpu()
    assert set(slots.tolist()) == {-1}
    assert list(sent.changed(sent.memory.cpu().numpy())) == []  # type: ignore[union-attr]


def test_one_number_out_of_a_row_is_sent_whatever_its_stride() -> None:
    one = torch.arange(6, dtype=torch.int32).view(3, 2)[1:2, 0]
    assert (one.stride(-1), one.is_contiguous()) == (2, True)
    assert send({"indices": one}, CUDA)[0]["indices"].tolist() == [2]


@triton.jit
def _sum_of_tile(numbers: Any, target: Any, count: int, masked: tl.constexpr, TILE: tl.constexpr) -> None:
    at = tl.arange(0, TILE)
    if masked:
        found = tl.load(numbers + at, at < count, other=0)
    else:
        found = tl.where(at < count, tl.load(numbers + at), 0)
    tl.store(target, tl.sum(found, 0))


def test_a_kernel_may_not_read_what_lies_between_even_if_it_leaves_that_out_of_its_result() -> None:
    # On a server each tensor has its own memory, and behind the last page of that a device reports an illegal access.
    tensors, _ = send({"lens": torch.tensor([3, 4]), "ids": torch.arange(200)}, CUDA)
    found = torch.zeros(1, dtype=torch.int64, device=CUDA)
    _sum_of_tile[(1,)](tensors["lens"], found, 2, masked=True, TILE=16)
    assert found.item() == 7
    with pytest.raises(StrayAccessError, match="past the end of numbers"):
        _sum_of_tile[(1,)](tensors["lens"], found, 2, masked=False, TILE=16)
