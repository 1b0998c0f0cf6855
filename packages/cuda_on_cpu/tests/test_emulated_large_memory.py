"""Memory of many gigabytes: it is not filled, and of a capture only what was touched is kept and put back."""

from __future__ import annotations

import ctypes

import pytest
import torch

from cuda_on_cpu import emulated_cuda, large_memory
from cuda_on_cpu.large_memory import LARGE, Saved, is_large


@pytest.fixture(autouse=True)
def device():
    with emulated_cuda():
        yield


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_large_begins_at_a_gibibyte():
    assert (is_large(LARGE - 1), is_large(LARGE), LARGE) == (False, True, 1 << 30)


def test_a_tensor_of_many_gigabytes_costs_what_is_touched_of_it():
    before = _resident()
    pool = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    pool[5 << 30] = 7
    assert (pool[0].item(), pool[5 << 30].item()) == (0, 7)
    assert _resident() - before < 1 << 28


def test_smaller_memory_is_filled():
    assert torch.empty(8, dtype=torch.uint8, device="cuda").tolist() == [255] * 8


def test_a_capture_puts_back_what_it_changed_in_large_memory():
    pool = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    first, last = pool[100:104], pool[-4:]
    first.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.add_(10)
        last.add_(5)
    assert (first.tolist(), last.tolist()) == ([1, 2, 3, 4], [0, 0, 0, 0])
    graph.replay()
    assert (first.tolist(), last.tolist()) == ([11, 12, 13, 14], [5, 5, 5, 5])


@pytest.mark.parametrize("nbytes", [LARGE - 8, LARGE + 8])
@pytest.mark.parametrize("at", [0, 4095, 4096, 1 << 20, -1])
def test_every_byte_is_put_back(nbytes, at):
    memory = torch.zeros(nbytes, dtype=torch.uint8) if nbytes < LARGE else torch.empty(nbytes, dtype=torch.uint8)
    address = memory.data_ptr()
    memory[at], memory[nbytes // 2] = 3, 4
    saved = Saved(address, nbytes)
    memory[at], memory[nbytes // 2], memory[nbytes // 4] = 9, 9, 9
    saved.put_back()
    assert (memory[at], memory[nbytes // 2], memory[nbytes // 4]) == (3, 4, 0)
    assert ctypes.string_at(address, 1) == bytes([int(memory[0])])


def test_a_long_run_of_touched_pages_is_kept_in_pieces(monkeypatch):
    # ctypes.string_at takes a size of 32 bits: of 4 GiB in one piece nothing would be kept.
    monkeypatch.setattr(large_memory, "LARGE", 1 << 20)
    memory = torch.arange(5 << 17, dtype=torch.int64)
    saved, before = Saved(memory.data_ptr(), memory.nbytes), memory.clone()
    assert max(len(held) for _, held in saved._pieces) <= 1 << 20
    memory.zero_()
    saved.put_back()
    assert torch.equal(memory, before)
