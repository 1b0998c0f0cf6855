"""Tensor descriptors, block pointers and hints to caches leave what they leave on the stock interpreter, and are looked
at as other loads and stores are."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cuda_on_cpu import DanglingMemoryError, EmulationError, emulated_cuda, triton_programs
from cuda_on_cpu.errors import StrayAccessError

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("descriptor_kernels")
Descriptor = kernels.TensorDescriptor

# Triton before 3.9, with a NumPy that warns of it
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning"),
]


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """Results of the stock interpreter, from a process that has not imported the emulation."""
    path = tmp_path_factory.mktemp("stock") / "found.pt"
    command = [sys.executable, "-W", "ignore", kernels.__file__, str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, cwd=Path(kernels.__file__).parent)
    return torch.load(path)


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", kernels.CASES)
def test_descriptors_leave_what_the_stock_interpreter_leaves(name, stock):
    with torch.no_grad(), emulated_cuda():
        found = kernels.CASES[name]("cuda")
    assert len(found) == len(stock[name])
    for one, other in zip(found, stock[name], strict=True):
        assert torch.equal(words(one), words(other))
    assert not torch.equal(words(found[0]), words(found[len(found) // kernels.ROUNDS])), "the rounds are alike"


def test_rows_that_a_descriptor_does_not_have_are_left_out():
    with torch.no_grad(), emulated_cuda():
        found = kernels.rows_picked(torch.int8)("cuda")
    for seed, out in enumerate(found):
        expected, x = kernels.numbers(9, torch.int8, 20, 64), kernels.numbers(seed, torch.int8, 20, 64)
        rows = [3, 0, 19, 7, 12, 5, 4, 11, 1, 18, 6]
        expected[rows] = x[rows]
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("pad", ["zero", "nan"])
def test_bfloat16_past_the_end_is_what_the_descriptor_says(pad):
    with torch.no_grad(), emulated_cuda():
        (found, *_), other = kernels.copies(torch.bfloat16, pad, 19, 40, 3, 16)("cuda"), kernels.given
        out, *_ = other(torch.bfloat16, pad)("cuda")
    value = 0.0 if pad == "zero" else float("nan")
    expected = torch.full((32, 64), value, dtype=torch.bfloat16)
    expected[:16, :24] = kernels.numbers(0, torch.bfloat16, 21, 48)[3:19, 16:40]
    assert torch.equal(found.float().nan_to_num(77), expected.float().nan_to_num(77))
    assert torch.equal(out[21:].cpu().float().nan_to_num(77), torch.full((11, 64), value).nan_to_num(77))


@pytest.mark.skipif(not kernels.HAS_BLOCK_POINTERS, reason="this Triton has no block pointers")
def test_bfloat16_past_the_end_of_a_block_pointer_is_what_the_load_says():
    with torch.no_grad(), emulated_cuda():
        out, *_ = kernels.blocks(torch.bfloat16, "nan")("cuda")
    expected = torch.full((32, 64), float("nan"), dtype=torch.bfloat16)
    expected[:21, 8:56] = kernels.numbers(0, torch.bfloat16, 21, 48)
    assert torch.equal(out.cpu().float().nan_to_num(77), expected.float().nan_to_num(77))


REDUCTIONS = {
    "add": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float32])
def test_atomics_of_a_descriptor_meet_the_rows_that_it_has(kind, dtype):
    if dtype.is_floating_point and (kind in ("and", "or", "xor") or (dtype == torch.float32 and kind != "add")):
        pytest.skip("the language has no such atomic")
    x, start = kernels.numbers(1, dtype, 24, 16), kernels.numbers(2, dtype, 9, 16)
    expected = start.clone()
    for part in x.view(3, 8, 16):
        expected[:6] = REDUCTIONS[kind](expected[:6], part[:6])
    with torch.no_grad(), emulated_cuda():
        out = start.cuda()
        kernels.reduce_by_descriptor[(3,)](x.cuda(), out, kind, N=16)
        assert torch.equal(words(out), words(expected))


@pytest.mark.parametrize("name", ["copy float16", "given float16", "rows float32", "product float16", "pages"])
def test_the_kernels_python_runs_for_two_programs_of_a_kind(name, monkeypatch):
    noted, plain = [], []
    note, run = triton_programs._Grid._note, triton_programs._Grid._run_python
    monkeypatch.setattr(triton_programs._Grid, "_note", lambda *args: (noted.append(1), note(*args)))
    monkeypatch.setattr(triton_programs._Grid, "_run_python", lambda *args: (plain.append(1), run(*args)))
    with torch.no_grad(), emulated_cuda():
        kernels.CASES[name]("cuda")
        assert not plain
        noted.clear()
        kernels.CASES[name]("cuda")
        assert not noted


def test_a_replay_sees_new_contents_through_descriptors(capture):
    with torch.no_grad(), emulated_cuda():
        x, out = torch.zeros(24, 96, dtype=torch.float16).cuda(), torch.zeros(32, 64, dtype=torch.float16).cuda()
        copied = torch.zeros(32, 64, dtype=torch.float16).cuda()

        def run():
            kernels.copy_from_descriptor[(2, 2)](Descriptor.from_tensor(x[3:, 16:64], [16, 32]), out, M=16, N=32)
            kernels.copy_by_descriptors[(2, 2)](out, copied, 30, 60, 64, 0, 0, 16, 32, "zero")

        graph, _ = capture(run)
        assert not out.any()
        for seed in (1, 2, 3):
            x.copy_(kernels.numbers(seed, torch.float16, 24, 96).cuda())
            graph.replay()
            expected = torch.zeros(32, 64, dtype=torch.float16)
            expected[:21, :48] = x.cpu()[3:, 16:64]
            assert torch.equal(out.cpu(), expected)
            assert torch.equal(copied.cpu()[:30, :60], expected[:30, :60])


def test_memory_behind_a_descriptor_that_is_gone_is_an_error(capture):
    with torch.no_grad(), emulated_cuda():
        inputs, out = [torch.ones(32, 64).cuda()], torch.zeros(32, 64).cuda()
        graph, _ = capture(
            lambda: kernels.copy_from_descriptor[(2, 2)](Descriptor.from_tensor(inputs[0], [16, 32]), out, M=16, N=32)
        )
        graph.replay()
        assert out.cpu().eq(1).all()
        inputs.clear()
        with pytest.raises(DanglingMemoryError, match="triton kernel copy_from_descriptor"):
            graph.replay()


def test_memory_of_a_descriptor_that_a_capture_made_is_kept(capture):
    with torch.no_grad(), emulated_cuda():
        x, out = torch.ones(32, 64).cuda(), torch.zeros(32, 64).cuda()

        def run():
            doubled = x * 2
            kernels.copy_from_descriptor[(2, 2)](Descriptor.from_tensor(doubled, [16, 32]), out, M=16, N=32)

        graph, _ = capture(run)
        for value in (3.0, 5.0):
            x.fill_(value)
            graph.replay()
            assert out.cpu().eq(2 * value).all()


def test_a_descriptor_of_host_memory_is_refused():
    with torch.no_grad(), emulated_cuda():
        out = torch.zeros(32, 64).cuda()
        for source in (Descriptor.from_tensor(torch.ones(32, 64), [16, 32]),):
            with pytest.raises(EmulationError, match="cannot be accessed from Triton"):
                kernels.copy_from_descriptor[(2, 2)](source, out, M=16, N=32)
            with pytest.raises(EmulationError, match="cannot be accessed from Triton"):
                kernels.of_three_axes[(5, 3)]((source, source), out, N=16)
        assert not out.any()


def test_a_descriptor_that_says_more_than_there_is_is_found():
    with torch.no_grad(), emulated_cuda():
        out = torch.zeros(32, 64).cuda()
        whole = Descriptor(out, [32, 64], [64, 1], [16, 32])
        kernels.add_to_descriptor[(2, 2)](out, whole, M=16, N=32)
        longer = Descriptor(out, [33, 64], [64, 1], [16, 32])
        kernels.fill_descriptor[(2, 2)](whole, M=16, N=32)
        with pytest.raises(StrayAccessError, match="a store of triton kernel fill_descriptor"):
            kernels.fill_descriptor[(3, 2)](longer, M=16, N=32)
        with pytest.raises(StrayAccessError, match="a load of triton kernel add_to_descriptor"):
            kernels.add_to_descriptor[(3, 2)](torch.zeros(48, 64).cuda(), longer, M=16, N=32)
        with pytest.raises(StrayAccessError, match="a load of triton kernel copy_by_descriptors"):
            kernels.copy_by_descriptors[(2, 2)](out, out, 2**20, 64, 64, 2**19, 0, 16, 32, "zero")


def test_an_atomic_that_exchanges_is_looked_at():
    triton_kernels = importlib.import_module("emulation_kernels")
    with torch.no_grad(), emulated_cuda():
        x = torch.zeros(8, dtype=torch.int32).cuda()
        triton_kernels.exchange[(1,)](x, 3)
        assert x.cpu().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
        with pytest.raises(StrayAccessError, match="a store of triton kernel exchange"):
            triton_kernels.exchange[(1,)](x, 8)
