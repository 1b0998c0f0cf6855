"""What packages ask of Triton's driver and of torch where they are imported, and optimizers where they step."""

from __future__ import annotations

import importlib
import os
import sys
import threading

import pytest
import torch

from cuda_on_cpu import EmulationError, emulated_cuda

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")
tl = importlib.import_module("triton.language")

# Triton before 3.9, with a NumPy that warns of it
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
ASKS = """
import torch, triton
target = triton.runtime.driver.active.get_current_target()
device = {"cuda": "cuda", "hip": "cuda"}.get(target.backend, target.backend)
torch_module = getattr(torch, device)
properties = triton.runtime.driver.active.utils.get_device_properties(0)
processors = properties["multiprocessor_count"]
shared = properties["max_shared_mem"]
benchmarker = triton.runtime.driver.active.get_benchmarker()
capability = triton.runtime.driver.active.get_device_capability(0)
"""


def asks(tmp_path, monkeypatch):
    (tmp_path / "asks_the_driver.py").write_text(ASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asks_the_driver", raising=False)
    return importlib.import_module("asks_the_driver")


@pytest.fixture
def without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")


def test_a_module_that_asks_for_the_target_where_it_is_imported(tmp_path, monkeypatch):
    with emulated_cuda():
        module = asks(tmp_path, monkeypatch)
        assert (module.target.backend, module.target.arch, module.target.warp_size) == ("cuda", 90, 32)
        properties = torch.cuda.get_device_properties(0)
        assert module.processors == properties.multi_processor_count
        assert module.shared == properties.shared_memory_per_block_optin
        assert module.capability == torch.cuda.get_device_capability()
        with module.torch_module.device(0):
            pass


def test_it_is_answered_outside_of_the_context_too(tmp_path, monkeypatch, without_a_gpu):
    with emulated_cuda():
        pass
    module = asks(tmp_path, monkeypatch)
    assert module.target.arch == 90
    assert module.torch_module is torch.cuda


def test_a_driver_that_was_set_is_the_one_outside(monkeypatch, without_a_gpu):
    config, own = triton.runtime.driver, object()
    with emulated_cuda():
        inside = config.active
        monkeypatch.setattr(config, "_active", own)
        assert config.active is inside
    assert config.active is own


def test_a_process_with_a_gpu_has_its_own_driver_outside(monkeypatch):
    with emulated_cuda():
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = type(triton.runtime.driver)()
    with pytest.raises(Exception, match=r"libcuda|driver|CUDA|cuda"):
        _ = config.active


def test_the_driver_names_the_current_stream():
    with emulated_cuda():
        driver = triton.runtime.driver.active
        assert driver.get_current_stream(0) == 0
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert driver.get_current_stream(driver.get_current_device()) == stream.cuda_stream
        assert driver.get_active_torch_device() == torch.device("cuda", 0)
        assert driver.get_device_interface() is torch.cuda
        driver.clear_cache(driver.get_empty_cache_for_benchmark())
        assert driver.map_python_to_cpp_type("*fp32")


def test_compiled_kernels_are_refused_with_the_reason():
    with emulated_cuda(), pytest.raises(EmulationError, match="TRITON_INTERPRET=1"):
        triton.runtime.driver.active.utils.load_binary("kernel", b"", 0, 0)


def test_a_tuner_takes_its_first_configuration_outside_of_the_context(without_a_gpu):
    with emulated_cuda():
        pass
    configs = [triton.Config({"BLOCK": size}) for size in (4, 8)]
    tuned = triton.autotune(configs, key=["n"])(kernels.add_block)
    x, block = torch.zeros(8), torch.zeros((), dtype=torch.int32)
    tuned[lambda meta: (8 // meta["BLOCK"],)](x, block, 8)
    assert (block.item(), x.tolist()) == (4, [1] * 8)


@pytest.mark.parametrize("quantiles", [None, (0.5,), (0.5, 0.2, 0.8)])
def test_the_benchmarker_runs_nothing(quantiles):
    with emulated_cuda():
        bench = triton.runtime.driver.active.get_benchmarker()
        found = bench(lambda: pytest.fail("it ran"), quantiles=quantiles)
    assert found == ([0.0] * 3 if quantiles is not None and len(quantiles) == 3 else 0.0)


def test_the_accelerator_is_the_emulated_device():
    accelerator = torch.accelerator
    with emulated_cuda():
        assert accelerator.is_available()
        assert accelerator.current_accelerator(check_available=True) == torch.device("cuda")
        assert accelerator.device_count() == 1
        assert accelerator.current_device_index() == 0
        accelerator.set_device_index(0)
        with accelerator.device_index(0), accelerator.device_index(None):
            x = torch.ones(1000, device=accelerator.current_accelerator())
        assert x.is_cuda
        for refused in (lambda: accelerator.set_device_index(1), lambda: accelerator.device_index(1).__enter__()):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                refused()
        stream = torch.cuda.Stream()
        accelerator.set_stream(stream)
        assert accelerator.current_stream() is torch.cuda.current_stream() is stream
        accelerator.synchronize()
        assert torch.get_device_module() is torch.cuda
        assert torch.get_device_module("cpu") is torch.cpu
        if hasattr(accelerator, "memory_allocated"):
            assert accelerator.memory_allocated() == torch.cuda.memory_allocated() >= 4000
            accelerator.empty_cache()
    assert torch.get_device_module("cuda") is torch.cuda


def test_a_graph_of_the_accelerator_captures_and_replays():
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("this torch has none")
    with torch.no_grad(), emulated_cuda():
        x = torch.zeros(4, device="cuda")
        graph, stream = torch.accelerator.Graph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with stream, graph:
            assert torch.accelerator.current_stream().is_capturing()
            x += 1
        torch.cuda.current_stream().wait_stream(stream)
        assert x.tolist() == [0] * 4
        graph.replay()
        graph.replay()
        assert x.tolist() == [2] * 4
        with pytest.raises(ZeroDivisionError), stream, torch.accelerator.Graph():
            x += 1 / 0
        assert not stream.is_capturing()


def test_a_stream_says_whether_it_captures():
    with torch.no_grad(), emulated_cuda():
        x, side, other = torch.zeros(4, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        assert not torch.cuda.current_stream().is_capturing()
        with torch.cuda.graph(graph):
            current = torch.cuda.current_stream()
            assert current.is_capturing()
            assert torch.cuda.is_current_stream_capturing()
            assert not side.is_capturing()
            side.wait_stream(current)
            assert side.is_capturing()
            current.wait_stream(side)
            assert not other.is_capturing()
            assert not torch.cuda.default_stream().is_capturing()
            x += 1
        assert not current.is_capturing()
        assert not side.is_capturing()
        found = []
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x += 1
            capturing = torch.cuda.current_stream()
            thread = threading.Thread(target=lambda: found.append(capturing.is_capturing()))
            thread.start()
            thread.join()
        assert found == [False], "a thread that is not inside the emulation"


def _trained(device: str, graph: bool, options: dict[str, bool], capturable: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3, device="cpu")
    layer.to(device)
    x = torch.randn(5, 4, device="cpu").to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, capturable=capturable, **options)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        layer(x).pow(2).sum().backward()
        optimizer.step()

    if not graph:
        for _ in range(6):
            step()
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        for _ in range(3):
            captured.replay()
    return [parameter.detach().cpu() for parameter in layer.parameters()]


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_adam_steps_eager_and_in_a_graph(options):
    expected = _trained("cpu", False, {"foreach": False}, capturable=False)
    with emulated_cuda():
        eager, replayed = _trained("cuda", False, options), _trained("cuda", True, options)
    for one, two, three in zip(eager, replayed, expected, strict=True):
        assert torch.equal(one, two)
        assert torch.allclose(one, three, rtol=1e-4, atol=1e-5)


def test_adam_that_is_not_capturable_is_refused_in_a_graph():
    with emulated_cuda(), pytest.raises(RuntimeError, match="capturable is False"):
        _trained("cuda", True, {}, capturable=False)
