"""The emulation stays out of the way: nothing before it is entered, everything restored after."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest
import torch

from cuda_on_cpu import LIMITS, CaptureError, Policy, emulated_cuda, is_active

_WATCHED = (
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.streams,
    torch.cuda.memory,
    torch.cuda.random,
)


@pytest.fixture(autouse=True)
def torch_has_settled():
    """The first capture makes torch import parts of itself, which is no doing of ours."""
    with emulated_cuda(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


def _world() -> dict[tuple[str, str], object]:
    return {
        (owner.__name__, name): value
        for owner in _WATCHED
        for name, value in vars(owner).items()
        if not isinstance(value, ModuleType)
    }


def _changed(before: dict[tuple[str, str], object]) -> list[tuple[str, str]]:
    now = _world()
    return [key for key in before.keys() | now.keys() if before.get(key) is not now.get(key)]


def test_importing_the_package_changes_nothing():
    code = (
        "import torch; keep = dict(vars(torch.Tensor)); cuda = dict(vars(torch.cuda));"
        "import cuda_on_cpu, sys;"
        "assert dict(vars(torch.Tensor)) == keep and dict(vars(torch.cuda)) == cuda;"
        "assert 'triton' not in sys.modules; assert not torch.cuda.is_available() or True"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_everything_is_restored_on_the_way_out():
    before = _world()
    with emulated_cuda():
        assert is_active()
        assert _changed(before)
    assert not is_active()
    assert not _changed(before)
    assert torch.zeros(1).device.type == "cpu"


def test_everything_is_restored_after_an_exception():
    before = _world()
    with pytest.raises(ZeroDivisionError), emulated_cuda():
        _ = 1 / 0
    assert not _changed(before)


def test_everything_is_restored_after_an_exception_inside_a_capture():
    before = _world()

    def fail_in_a_capture() -> None:
        with emulated_cuda(), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.CUDAGraph().capture_begin()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_a_capture()
    assert not _changed(before)
    with emulated_cuda():
        assert not torch.cuda.is_current_stream_capturing()
        assert (torch.ones(1, device="cuda") + 1).item() == 2


def test_contexts_nest_and_an_inner_policy_ends_with_its_block():
    def first_byte() -> int:
        return int(torch.empty(1, dtype=torch.uint8, device="cuda"))

    before = _world()
    with emulated_cuda(Policy(fill=1)):
        assert first_byte() == 1
        with emulated_cuda():
            assert first_byte() == 1
            with emulated_cuda(Policy(fill=2)):
                assert first_byte() == 2
        assert first_byte() == 1
        assert is_active()
    assert not _changed(before)


def test_tensors_outlive_the_context_as_plain_cpu_tensors():
    with emulated_cuda():
        x = torch.ones(4, device="cuda")
    assert x.device.type == "cpu"
    assert x.numpy().sum() == 4
    with emulated_cuda():
        assert x.is_cuda


def test_another_thread_is_outside_until_it_enters():
    seen: dict[str, object] = {}

    def other() -> None:
        seen["active"] = is_active()
        seen["available"] = torch.cuda.is_available()
        with emulated_cuda():
            graph = torch.cuda.CUDAGraph()
            x = torch.ones(4, device="cuda")
            with torch.cuda.graph(graph):
                y = x + 1
            graph.replay()
            seen["result"] = y.tolist()

    available = torch.cuda.is_available()
    with emulated_cuda():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert is_active()
    assert seen == {"active": False, "available": available, "result": [2.0] * 4}


def test_threads_capture_independently():
    before = _world()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad(), emulated_cuda():
                x = torch.full((4,), float(number), device="cuda")
                for _ in range(5):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        y = x * 2
                        time.sleep(0.002)
                    graph.replay()
                    assert y.tolist() == [2.0 * number] * 4
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not _changed(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it imports its compiler
def test_compiled_helpers_run_eagerly():
    calls = []

    @torch.compile
    def compiled_before(x):
        calls.append(1)
        return torch.zeros_like(x) + x * 2

    with torch.no_grad(), emulated_cuda():

        @torch.compile
        def compiled_inside(x):
            return compiled_before(x) + torch.arange(4, device=x.device)

        x = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled_inside(x)
        x.fill_(3)
        graph.replay()
        assert y.tolist() == [6, 7, 8, 9]
        assert y.is_cuda
        with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.compile(lambda t: t * t.sum().item())(x)
    assert len(calls) == 1


def test_entering_is_cheap():
    with emulated_cuda():
        pass
    costs = []
    for _ in range(20):
        start = time.process_time()
        with emulated_cuda():
            pass
        costs.append(time.process_time() - start)
    assert min(costs) < 1e-3  # 0.2 ms here; the limit leaves room for a busy machine


def test_a_policy_refuses_nonsense():
    with pytest.raises(ValueError, match="dangling"):
        Policy(dangling="ignore")
    with pytest.raises(ValueError, match="one byte"):
        Policy(fill=256)


def test_limits_are_sentences():
    assert len(LIMITS) >= 5
    assert all(limit.endswith(".") for limit in LIMITS)
