"""Functions of the language under another name, and numbers of Python that a compiled kernel has as tensors."""

from __future__ import annotations

import importlib
import os
import types

import pytest
import torch

from cuda_on_cpu import EmulationError, emulated_cuda, triton_programs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("names_kernels")

# Triton before 3.9, with a NumPy that warns of it
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("cuda"),
]
N = 8
COUNTS = [3, 4, 0, 5, 3, 4, 7, 3]


@pytest.fixture(params=["noted down", "left to Python"])
def ways(request, monkeypatch):
    """Programs that repeat what others did, and the kernel's own Python for each."""
    if request.param == "left to Python":
        monkeypatch.setattr(triton_programs._Kernel, "history", lambda *_: None)
    return request.param


@pytest.fixture
def rows():
    x = torch.randn(len(COUNTS), N, generator=torch.Generator().manual_seed(3))
    return x, torch.zeros(len(COUNTS), N).cuda(), torch.tensor(COUNTS, dtype=torch.int32).cuda()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_functions_of_the_language_under_other_names(rows, ways):
    x, out, counts = rows
    kernels.by_other_names[(len(COUNTS),)](x.cuda(), out, counts, N)
    count = torch.tensor(COUNTS)[:, None]
    expected = x.exp().clamp(min=1.5) + (x.abs() + 1).log() + count
    expected += x.exp() * 3 * (count * (count - 1) // 2)
    assert close(out, expected)


def test_a_name_that_comes_to_hold_another_function_is_seen(rows, monkeypatch, ways):
    x, out, counts = rows
    kernels.by_other_names[(len(COUNTS),)](x.cuda(), out, counts, N)
    before = out.cpu().clone()
    monkeypatch.setattr(kernels.op, "logarithm", importlib.import_module("triton.language").sqrt)
    kernels.by_other_names[(len(COUNTS),)](x.cuda(), out, counts, N)
    assert close(out, before - (x.abs() + 1).log() + (x.abs() + 1).sqrt())


def test_counters_and_floats_may_be_taken_for_tensors(rows, ways):
    x, out, counts = rows
    kernels.counters_as_tensors[(len(COUNTS),)](x.cuda(), out, counts, 0.5, N)
    for row, count in enumerate(COUNTS):
        more = sum(i + i // 2 + 1 - i for i in range(0, N, 4)) + sum(2 * i * 0.5 for i in range(count))
        more += sum(2**i - i for i in range(count, 0, -2) if i % 3 != 0)
        assert close(out[row], x[row] + more)


def test_programs_with_counters_are_noted_down(rows, monkeypatch):
    x, out, counts = rows
    python = []
    run = triton_programs._Grid._run_python
    monkeypatch.setattr(triton_programs._Grid, "_run_python", lambda *args: (python.append(1), run(*args)))
    kernels.counters_as_tensors[(len(COUNTS),)](x.cuda(), out, counts, 0.25, N)
    kernels.by_other_names[(len(COUNTS),)](x.cuda(), out, counts, N)
    assert not python


def test_numbers_compute_as_the_interpreters(ways):
    out = torch.zeros(len(COUNTS), N, dtype=torch.float64).cuda()
    kernels.counters_as_numbers[(len(COUNTS),)](out, torch.tensor(COUNTS, dtype=torch.int32).cuda(), N)
    at = torch.arange(N, dtype=torch.float64)
    for row, count in enumerate(COUNTS):
        expected = torch.zeros(N, dtype=torch.float64)
        for i in range(1, count + 1):
            expected += i / 4 + i**2 - (i << 3) + i % 5 + abs(-i) + (7 & i) + 3 // i + (i if i > 2 else -i)
            expected += at * i
            expected += (1 << 40) * i
        for i in range(5):
            expected += i * (2**33 + i)
        assert torch.equal(out[row].cpu(), expected)


def test_a_counter_has_nothing_that_a_tensor_does_not_have(ways):
    out, counts = torch.zeros(8).cuda(), torch.full((1,), 4, dtype=torch.int32).cuda()
    with pytest.raises(Exception, match="'int' object has no attribute 'nothing_of_the_kind'"):
        kernels.other_attributes[(1,)](out, counts, N)


def test_a_kernel_that_changes_its_module_runs_in_it(ways, monkeypatch):
    monkeypatch.setattr(kernels, "STEP", 0)
    x = torch.zeros(N).cuda()
    kernels.counts_for_the_module[(3,)](x, N)
    assert x.cpu().tolist() == [1] * N
    assert int(kernels.STEP.handle.data.item()) == 3


def test_a_module_keeps_its_own_names():
    assert isinstance(kernels.op, types.ModuleType)
    language = importlib.import_module("triton.language")
    assert kernels.exponential is language.exp
    assert kernels.counted is language.range
    with emulated_cuda():
        assert kernels.exponential is language.exp


def test_a_name_that_a_module_gets_later_is_seen(ways, monkeypatch):
    x = torch.zeros(N).cuda()
    with pytest.raises(Exception, match="amount"):
        kernels.adds_what_comes_later[(1,)](x, N)
    monkeypatch.setattr(kernels, "amount", kernels.twice, raising=False)
    kernels.adds_what_comes_later[(1,)](x, N)
    assert x.cpu().tolist() == [2 * N] * N


def test_functions_of_nvidias_library_are_those_of_the_language_or_refused(ways):
    x = torch.linspace(-2, 2, N)
    device = x.cuda()
    kernels.by_the_library[(1,)](device, N)
    assert close(device, x.exp() + x.floor())
    with pytest.raises(EmulationError, match=r"libdevice.tan in a triton kernel .*NVIDIA's code"):
        kernels.by_the_library_alone[(1,)](device, N)


def test_a_constant_of_the_module_is_added_to_a_tensor(ways):
    x = torch.zeros(N).cuda()
    kernels.adds_a_constant_of_the_module[(1,)](x, N)
    assert x.tolist() == [12 + at for at in range(N)]
