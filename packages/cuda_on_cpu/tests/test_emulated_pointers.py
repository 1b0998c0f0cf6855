"""Loads and stores of a kernel touch what they touch on the stock interpreter, and nothing that is masked off."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from cuda_on_cpu import emulated_cuda, triton_memory

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")
interpreter = importlib.import_module("triton.runtime.interpreter")

# Triton before 3.9, with a NumPy that warns of it
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

ROWS, COLUMNS = 8, 4
FAR = 2**45
"""So far away there is no memory."""


def gather(x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor, by_row: bool) -> list[torch.Tensor]:
    """What the kernel loaded, and what it left in `x`, in the emulation."""
    with torch.no_grad(), emulated_cuda():
        device, out = x.cuda(), torch.zeros(ROWS, COLUMNS, dtype=x.dtype, device="cuda")
        kernels.gather[(1,)](device, at.cuda(), mask.cuda(), out, ROWS=ROWS, COLUMNS=COLUMNS, BY_ROW=by_row)
        return [out.cpu(), device.cpu()]


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("live", [[], [3], [0, 2, 5], range(ROWS)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.int64], ids=str)
def test_a_masked_block_is_read_and_written_where_it_is_live(dtype, live, by_row):
    x = torch.arange(100).to(dtype)
    at = torch.tensor([40, 8, 80, 0, 96, 12, 60, 4])
    mask = torch.tensor([row in live for row in range(ROWS)])
    at[~mask] = FAR
    chosen = mask[:, None] & ((torch.arange(COLUMNS) % 2 == 0) | by_row)
    places = (at.masked_fill(~mask, 0)[:, None] + torch.arange(COLUMNS)).masked_fill(~chosen, 0)
    expected = torch.where(chosen, x[places], -1)
    left = x.clone()
    left[places[chosen]] = x[places[chosen]] + 1
    found, after = gather(x, at, mask, by_row)
    assert torch.equal(found, expected.to(dtype))
    assert torch.equal(after, left)


def test_an_offset_may_be_negative():
    x, mask = torch.arange(100.0), torch.ones(ROWS, dtype=torch.bool)
    with torch.no_grad(), emulated_cuda():
        device, out = x.cuda(), torch.zeros(ROWS, COLUMNS, device="cuda")
        at = torch.arange(0, -4 * ROWS, -4).cuda()
        kernels.gather[(1,)](device[50:], at, mask.cuda(), out, ROWS=ROWS, COLUMNS=COLUMNS, BY_ROW=True)
        assert torch.equal(out.cpu(), x[(50 - 4 * torch.arange(ROWS))[:, None] + torch.arange(COLUMNS)])


def test_the_last_of_several_stores_to_one_place_stays():
    at = torch.tensor([0, 1, 0, 2, 1, 0, 3, 3])
    with torch.no_grad(), emulated_cuda():
        out = torch.zeros(4, dtype=torch.int32, device="cuda")
        kernels.scatter[(1,)](out, at.cuda(), N=8)
        assert out.tolist() == [5, 4, 3, 7]


def test_what_is_not_aligned_is_read_and_written_as_it_lies():
    x, out = torch.arange(40, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    kernels.copy_unaligned[(1,)](x, out, N=8)
    with torch.no_grad(), emulated_cuda():
        device, found = torch.arange(40, dtype=torch.int32).cuda(), torch.zeros(8, dtype=torch.int32, device="cuda")
        kernels.copy_unaligned[(1,)](device, found, N=8)
        assert torch.equal(found.cpu(), out)
        assert torch.equal(device.cpu(), x)
    assert out.tolist() == [(n >> 8) + ((n + 1) << 24) for n in range(8)]


def test_an_interpreter_that_loads_otherwise_is_used_as_it_is(monkeypatch):
    assert triton_memory.replacements(interpreter)
    stock = interpreter.InterpreterBuilder.create_masked_load

    def backwards(self, *args):
        found = stock(self, *args)
        found.data = found.data[::-1]
        return found

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", backwards)
    assert triton_memory.replacements(interpreter) == []


def test_an_interpreter_without_a_part_is_used_as_it_is(monkeypatch):
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_addptr")
    assert triton_memory.replacements(interpreter) == []
