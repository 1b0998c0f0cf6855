"""Programs that repeat the calls of others leave the memory that the stock interpreter leaves, and fail as it fails."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable

import pytest
import torch

from cuda_on_cpu import emulated_cuda, triton_launch, triton_programs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

interpreter = importlib.import_module("triton.runtime.interpreter")
kernels = importlib.import_module("emulation_kernels")
tl = importlib.import_module("triton.language")

pytestmark = [
    # Triton before 3.9, with a NumPy that warns of it
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
Launch = Callable[..., None]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many programs were noted down, and how many were left to the kernel's Python."""
    if "interpreter_semantic" not in inspect.getsource(interpreter._patch_attr):
        pytest.skip("what an earlier launch outside the emulation left in this Triton's language cannot be noted down")
    found = {"_note": 0, "_run_python": 0}
    for name in found:
        stock = getattr(triton_programs._Grid, name)

        def counted(*args: object, name: str = name, stock: Callable[..., None] = stock) -> None:
            found[name] += 1
            stock(*args)

        monkeypatch.setattr(triton_programs._Grid, name, counted)
    return found


def both(launch: Launch, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """The tensors after `launch` by the stock interpreter, and after it in the emulation."""
    plain = [tensor.clone() for tensor in tensors]
    launch(*plain)
    with torch.no_grad(), emulated_cuda():
        device = [tensor.cuda() for tensor in tensors]
        launch(*device)
        return [plain, [tensor.cpu() for tensor in device]]


def assert_alike(launch: Launch, *tensors: torch.Tensor) -> None:
    plain, device = both(launch, *tensors)
    for one, other in zip(plain, device, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    changed = [not torch.equal(one, given) for one, given in zip(plain, tensors, strict=True)]
    assert any(changed)


def test_programs_with_other_loops_branches_and_numbers_give_the_same_bits(counts):
    torch.manual_seed(0)
    x, out = torch.randn(12, 96), torch.zeros(12, 8)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        lens = torch.randint(0, 90, (12,), generator=generator, dtype=torch.int32)
        flags = torch.randint(0, 2, (12,), generator=generator, dtype=torch.int32)
        scale, rows = [0.3, 2.0, -1.5, 0.0, 1e-30, 7][seed], 12 - seed % 3
        assert_alike(
            lambda x, lens, flags, out, scale=scale, rows=rows: kernels.follow[(12,)](
                x, lens, flags, out, rows, scale, 96, BACK=20, BLOCK=8
            ),
            x, lens, flags, out,
        )  # fmt: skip
    assert counts["_run_python"] == 0


@pytest.mark.parametrize("start", [-40, -1, 0, 1])
def test_a_loop_may_begin_anywhere(start):
    x = torch.arange(64.0)
    lens = torch.tensor([7, 9, 30, 8], dtype=torch.int32)
    out, flags = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int32)
    assert_alike(
        lambda x, lens, flags, out: kernels.follow[(4,)](x, lens, flags, out, 4, 1.0, 8, BACK=8 - start, BLOCK=8),
        x, lens, flags, out,
    )  # fmt: skip


def test_sums_and_products_of_what_lies_otherwise_in_memory_give_the_same_bits():
    torch.manual_seed(1)
    x, out = torch.randn(5, 32, 64), torch.zeros(5, 64)
    assert_alike(lambda x, out: kernels.sum_of_transposed[(5,)](x, out, 0.7, M=32, N=64), x, out)


def test_the_kernels_python_runs_for_two_programs_that_are_alike(counts):
    with torch.no_grad(), emulated_cuda():
        x = torch.zeros(64, device="cuda")
        for step in (1.0, 2.0, 3.5):
            # No other test has this block, whatever ran before in this process.
            kernels.add_blocked[(32,)](x, step, BLOCK=2)
        assert x.tolist() == [6.5] * 64
    assert counts == {"_note": 2, "_run_python": 0}


def test_what_a_program_did_before_it_took_another_way_is_not_done_twice(counts):
    x, flags = torch.zeros(12, 4), torch.tensor([0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0], dtype=torch.int32)
    assert_alike(lambda x, flags: kernels.add_then_choose[(12,)](x, flags, 10.0, BLOCK=4), x, flags)
    assert counts["_note"] == 4, "two for each way"


def test_a_program_that_fails_leaves_the_memory_that_it_leaves_on_the_stock_interpreter():
    flags = torch.tensor([0, 0, 0, 0, 1, 0], dtype=torch.int32)

    def refused(x, flags):
        with pytest.raises(Exception, match="Assume failed"):
            kernels.add_then_refuse[(6,)](x, flags, BLOCK=4)

    assert_alike(refused, torch.zeros(6, 4), flags)


def test_an_error_shows_the_line_of_the_kernel():
    with torch.no_grad(), emulated_cuda():
        x, flags = torch.zeros(6, 4, device="cuda"), torch.tensor([3, 3, 4, 3, 2, 3], dtype=torch.int32).cuda()
        with pytest.raises(Exception, match="ZeroDivisionError") as caught:
            kernels.divide_by_flag[(6,)](x, flags, BLOCK=4)
    trace, names = caught.value.__cause__.__traceback__, []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert names[-1] == "divide_by_flag"
    assert x.cpu()[:, 0].tolist() == [12, 12, 12, 12, 0, 0]


def test_a_constant_of_the_module_that_changes_is_seen(monkeypatch):
    with torch.no_grad(), emulated_cuda():
        x = torch.zeros(16, device="cuda")
        kernels.add_step[(4,)](x, BLOCK=4)
        monkeypatch.setattr(kernels, "STEP", tl.constexpr(10))
        kernels.add_step[(4,)](x, BLOCK=4)
        assert x.tolist() == [11] * 16


def test_a_function_of_the_module_that_changes_is_seen(monkeypatch):
    x, out = torch.rand(4, 96), torch.zeros(4, 8)
    lens, flags = torch.full((4,), 40, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)

    def launch(x, lens, flags, out):
        kernels.follow[(4,)](x, lens, flags, out, 4, 1.0, 96, BACK=30, BLOCK=8)

    assert_alike(launch, x, lens, flags, out)
    before = both(launch, x, lens, flags, out)[1][3]
    monkeypatch.setattr(kernels, "squared", kernels.smaller_than_one)
    assert_alike(launch, x, lens, flags, out)
    assert not torch.equal(both(launch, x, lens, flags, out)[1][3], before)


def test_what_prints_prints_for_every_program(capsys, counts):
    with torch.no_grad(), emulated_cuda():
        x = torch.zeros(20, device="cuda")
        kernels.add_and_print[(5,)](x, BLOCK=4)
        assert x.tolist() == [1] * 20
    assert capsys.readouterr().out.count("a program") == 5
    assert counts["_run_python"] == 5


def test_a_reduction_by_the_kernels_own_function_is_left_to_its_python(counts):
    torch.manual_seed(2)
    assert_alike(lambda x, out: kernels.smallest[(5,)](x, out, BLOCK=8), torch.randn(5, 8), torch.zeros(5))
    assert counts == {"_note": 1, "_run_python": 5}


def test_a_debugger_sees_every_program(counts):
    seen = []

    def trace(frame, event, _):
        if event == "call" and frame.f_code.co_name == "add_blocked":
            seen.append(frame)

    with torch.no_grad(), emulated_cuda():
        x, before = torch.zeros(20, device="cuda"), sys.gettrace()
        sys.settrace(trace)
        try:
            kernels.add_blocked[(5,)](x, 1.0, BLOCK=4)
        finally:
            sys.settrace(before)
    assert len(seen) == 5


def test_a_loop_that_never_ends_alike_is_given_up(monkeypatch, counts):
    monkeypatch.setattr(triton_programs, "_TRIES", 4)
    x, out = torch.rand(20, 8), torch.zeros(20, 8)
    lens, flags = torch.arange(0, 100, 5, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    assert_alike(
        lambda x, lens, flags, out: kernels.follow[(20,)](x, lens, flags, out, 20, 1.0, 1, BACK=400, BLOCK=8),
        x, lens, flags, out,
    )  # fmt: skip
    assert counts["_run_python"] > 0


def test_an_interpreter_without_a_part_is_not_known(monkeypatch):
    assert triton_programs.knows(interpreter)
    monkeypatch.delattr(interpreter.ReduceScanOpInterface, "apply")
    assert not triton_programs.knows(interpreter)


def test_an_interpreter_that_is_not_known_launches_as_it_is(monkeypatch):
    monkeypatch.setattr(triton_programs, "knows", lambda module: False)
    triton_launch.replacements_in.cache_clear()
    try:
        assert_alike(lambda x: kernels.add_blocked[(5,)](x, 1.5, BLOCK=4), torch.zeros(20))
    finally:
        triton_launch.replacements_in.cache_clear()
