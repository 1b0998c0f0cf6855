"""Triton kernels under the interpreter are captured and replayed like any other kernel."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from cuda_on_cpu import DanglingMemoryError, EmulationError, triton_launch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    # Triton before 3.9, with a NumPy that warns of it
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def zeros(n: int = 8) -> torch.Tensor:
    return torch.zeros(n, device="cuda")


def test_launches_and_torch_operations_keep_their_order(capture):
    x = zeros()

    def run():
        x.mul_(2)
        kernels.add[(1,)](x, 1.0, N=8)
        y = x * 10
        kernels.add[lambda meta: (meta["N"] // 8,)](x, 2.0, N=8)
        return y

    graph, y = capture(run)
    assert x.sum() == 0
    x.fill_(1)
    graph.replay()
    assert y.tolist() == [30] * 8
    assert x.tolist() == [5] * 8
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [50] * 8
    assert x.tolist() == [7] * 8


def test_a_kernel_that_may_begin_early_begins_when_the_one_before_it_has_ended(capture):
    x = zeros()

    def run():
        kernels.add[(1,)](x, 1.0, N=8)
        x.mul_(3)
        kernels.add_early[(1,)](x, 1.0, N=8)

    graph, _ = capture(run)
    run()
    assert x.tolist() == [4] * 8
    graph.replay()
    assert x.tolist() == [16] * 8


def test_host_values_of_a_launch_are_frozen(capture):
    x, step, blocks = zeros(), [1.0], [2]
    graph, _ = capture(lambda: kernels.add_blocked[(blocks[0],)](x, step[0], BLOCK=4))
    step[0], blocks[0] = 5.0, 1
    graph.replay()
    assert x.tolist() == [1] * 8


def test_device_values_of_a_launch_are_read_at_replay(capture):
    x, count = torch.ones(8, device="cuda"), torch.tensor([3], dtype=torch.int32).cuda()
    out = zeros(1)
    graph, _ = capture(lambda: kernels.sum_first[(1,)](x, count, out, N=8))
    graph.replay()
    assert out.tolist() == [3]
    count.fill_(6)
    graph.replay()
    assert out.tolist() == [6]


def test_autotuned_and_heuristic_kernels_are_resolved_before_they_are_recorded(capture):
    x = zeros()
    kernels.tuned[(1,)](x, 1.0, 8)
    x.zero_()
    graph, _ = capture(lambda: kernels.tuned[(1,)](x, 1.0, 8))
    assert x.sum() == 0
    graph.replay()
    graph.replay()
    assert x.tolist() == [2] * 8


def test_a_kernel_does_not_take_host_memory():
    with pytest.raises(EmulationError, match="cannot be accessed from Triton"):
        kernels.add[(1,)](torch.zeros(8), 1.0, N=8)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        kernels.add[(1,)](torch.zeros(8), 1.0, N=8)


def test_a_grid_that_a_gpu_would_refuse_is_refused(capture):
    x = zeros()
    for grid in ((1, 65_536), (1, 1, 65_536), lambda meta: (meta["N"] // 8, 65_536)):
        with pytest.raises(EmulationError, match=r"kernel add with a grid of .*invalid argument"):
            kernels.add[grid](x, 1.0, N=8)
    with pytest.raises(EmulationError, match="y and z hold 65,535"):
        capture(lambda: kernels.add[(1, 65_536)](x, 1.0, N=8))
    assert x.tolist() == [0] * 8
    for grid in ((65_536,), (1, 65_535, 65_535)):
        assert triton_launch._Grid(grid, "add")({}) == grid


def test_what_a_grid_puts_into_its_arguments_is_launched_and_captured(capture):
    given, used = zeros(), zeros()

    def grid(meta):
        assert meta["x"] is given, "as on a GPU: the tensor, not a pointer of the interpreter"
        meta["x"] = used
        return (1,)

    kernels.add[grid](given, 1.0, N=8)
    assert (given.tolist(), used.tolist()) == ([0] * 8, [1] * 8)
    graph, _ = capture(lambda: kernels.add[grid](given, 1.0, N=8))
    graph.replay()
    assert (given.tolist(), used.tolist()) == ([0] * 8, [2] * 8)


def test_freed_memory_of_a_launch_is_an_error(capture):
    inputs = [zeros()]
    graph, _ = capture(lambda: kernels.add[(1,)](inputs[0], 1.0, N=8))
    inputs.clear()
    with pytest.raises(DanglingMemoryError, match="triton kernel add"):
        graph.replay()


def test_an_error_in_a_kernel_leaves_the_emulation_healthy(capture):
    x = zeros()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        capture(lambda: (x.add_(1), kernels.broken[(1,)](x, N=8)))
    assert x.sum() == 0
    graph, y = capture(lambda: x + 1)
    graph.replay()
    assert y.tolist() == [1] * 8


def test_the_language_is_restored_after_a_launch():
    import triton.language as tl

    before = {name: value for owner in (tl, tl.core, tl.tensor) for name, value in vars(owner).items()}
    kernels.sum_first[(1,)](torch.ones(8).cuda(), torch.tensor([3], dtype=torch.int32).cuda(), zeros(1), N=8)
    after = {name: value for owner in (tl, tl.core, tl.tensor) for name, value in vars(owner).items()}
    assert [name for name in before if before[name] is not after[name]] == []


def test_a_launch_gives_the_same_result_as_outside():
    host = torch.zeros(8)
    device = zeros()
    kernels.add[(1,)](device, 2.5, N=8)
    assert host.add(2.5).tolist() == device.tolist()
