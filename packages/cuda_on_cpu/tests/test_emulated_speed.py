"""The faster Triton interpreter computes what the stock one computes, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os

import pytest
import torch

from cuda_on_cpu import emulated_cuda, triton_speed

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

bench_kernel = importlib.import_module("bench_kernel")
interpreter = importlib.import_module("triton.runtime.interpreter")
kernels = importlib.import_module("emulation_kernels")


# Triton before 3.9, with a NumPy that warns of it
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def _world() -> dict[tuple[str, str], object]:
    core = interpreter.tl.core
    owners = (
        interpreter,
        interpreter.GridExecutor,
        interpreter.InterpretedFunction,
        interpreter.InterpreterBuilder,
        interpreter.ReduceScanOpInterface,
        interpreter.ReduceOps,
        interpreter.ScanOps,
        importlib.import_module("triton.runtime.autotuner").Autotuner,
        core,
        core.tensor,
        core.block_type,
    )
    found = {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}
    found["builder", "options"] = interpreter.interpreter_builder.options
    return {**found, ("semantic", "builder"): interpreter.interpreter_semantic.builder}


def test_an_attention_kernel_gives_the_same_bits():
    plain = bench_kernel.problem("cpu")
    bench_kernel.launch(plain)
    with torch.no_grad(), emulated_cuda():
        device = bench_kernel.problem("cuda")
        bench_kernel.launch(device)
        assert torch.equal(plain[3], device[3].cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.int8])
def test_a_kernel_of_many_operations_gives_the_same_bits(dtype):
    x = (torch.arange(64).view(8, 8) % 13 - 6).to(dtype)
    plain = torch.zeros(8, 8)
    kernels.many[(2,)](x, plain, 8, N=8, BLOCK=4)
    with torch.no_grad(), emulated_cuda():
        device = torch.zeros(8, 8, device="cuda")
        kernels.many[(2,)](x.cuda(), device, 8, N=8, BLOCK=4)
        assert torch.equal(plain, device.cpu())
    assert plain.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8])
def test_sums_maxima_and_minima_give_the_same_bits(dtype):
    x = (torch.randn(40, 16, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    if dtype.is_floating_point:
        x[1, 3], x[2], x[5, 5] = torch.nan, torch.nan, torch.inf
    found = []
    for device in ("cpu", "cuda"):
        with torch.no_grad(), emulated_cuda() if device == "cuda" else contextlib.nullcontext():
            given = [torch.zeros(size, dtype=dtype, device=device) for size in (5 * 3 * 8, 5 * 3 * 16, 5 * 3)]
            for _ in range(2):  # noted down, then walked
                kernels.reduced[(5,)](x.to(device), *given, ROWS=8, COLUMNS=16)
            found.append(torch.cat([each.cpu() for each in given]).view(torch.uint8))
    assert torch.equal(*found)


def test_the_interpreter_is_itself_again_afterwards():
    bench_kernel.launch(bench_kernel.problem("cpu"))
    before = _world()
    with torch.no_grad(), emulated_cuda():
        assert triton_speed.replacements(interpreter)
        bench_kernel.launch(bench_kernel.problem("cuda"))
    after = _world()
    assert [key for key in before if before[key] is not after[key]] == []


@pytest.mark.parametrize(
    ("owner", "gone"),
    [
        ("interpreter_builder", "options"),
        ("", "_get_np_dtype"),
        ("", "_patch_lang"),
    ],
    ids=lambda name: name or "interpreter",
)
def test_an_interpreter_that_changed_is_used_as_it_is(monkeypatch, owner, gone):
    whole = len(triton_speed.replacements(interpreter))
    triton_speed.patches_can_be_shared.cache_clear()
    monkeypatch.delattr(operator.attrgetter(owner)(interpreter) if owner else interpreter, gone)
    try:
        assert len(triton_speed.replacements(interpreter)) == whole - 1
    finally:
        triton_speed.patches_can_be_shared.cache_clear()
