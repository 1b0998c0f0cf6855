"""Programs that say "cuda" run unmodified, and host and device memory are kept apart."""

from __future__ import annotations

import gc
import warnings
from copy import deepcopy  # noqa: F401 - the programs below use it

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cuda_on_cpu import CaptureError, EmulationError, HostSyncError

pytestmark = pytest.mark.usefixtures("cuda")

CUDA = torch.device("cuda", 0)


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device="cuda")


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_the_target_of_a_copy_lies_where_it_lay(pin: bool, wait: bool, whole: bool) -> None:
    host = torch.zeros(4, pin_memory=pin)
    target = host if whole else host[:2]
    assert target.copy_(ones(len(target)), non_blocking=not wait) is target
    torch.cuda.synchronize()
    assert host.device == target.device == torch.device("cpu")
    assert host.is_pinned() == pin
    assert host.numpy().tolist() == ([1.0] * 4 if whole else [1.0, 1.0, 0.0, 0.0])
    device = torch.zeros(4, device="cuda")
    assert device.copy_(host, non_blocking=not wait).device == device.device == CUDA


def test_the_target_of_a_copy_lies_where_it_lay_while_host_syncs_are_looked_for() -> None:
    host = torch.zeros(4, pin_memory=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        host.copy_(ones(), non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert host.device == torch.device("cpu")
    assert host.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "make",
    [
        "torch.zeros(3, device='cuda')",
        "torch.zeros(3, device='cuda:0')",
        "torch.zeros(3, device=torch.device('cuda'))",
        "torch.zeros(3, device=0)",
        "torch.zeros(3).cuda()",
        "torch.zeros(3).to('cuda')",
        "torch.zeros(3).to(0)",
        "torch.zeros(3).to(device='cuda', dtype=torch.bfloat16, non_blocking=True)",
        "torch.zeros(3).to(ones())",
        "torch.tensor([1, 2], device='cuda')",
        "torch.as_tensor(np.zeros(3), device='cuda')",
        "torch.zeros_like(torch.zeros(3), device='cuda')",
        "ones().new_zeros(2)",
        "ones().new_tensor([1.0])",
        "torch.full_like(ones(), 2)",
        "ones()[1:3]",
        "ones() + 1",
        "torch.cat([ones(), ones()])",
        "ones().split(2)[0]",
        "torch.empty_like(ones())",
        "F.one_hot(torch.arange(3, device='cuda'), 4)",
        "deepcopy(ones())",
        "torch.nn.Linear(2, 2).cuda().weight",
        "torch.nn.Linear(2, 2).to('cuda').bias",
        "torch.nn.Linear(2, 2, device='cuda').weight",
        "torch.nn.Parameter(ones())",
    ],
)
def test_device_memory_says_so(make):
    tensor = eval(make)
    assert tensor.device == CUDA
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.get_device() == 0
    assert "device='cuda:0'" in repr(tensor)


@pytest.mark.parametrize(
    "make",
    [
        "torch.zeros(3)",
        "ones().cpu()",
        "ones().to('cpu')",
        "ones().to(torch.zeros(1))",
        "torch.zeros_like(ones(), device='cpu')",
        "ones().new_zeros(3, device='cpu')",
        "torch.tensor([1.0])",
        "torch.from_numpy(np.zeros(2))",
        "torch.zeros(3, pin_memory=True)",
        "ones().cpu().pin_memory()",
    ],
)
def test_host_memory_says_so(make):
    tensor = eval(make)
    assert tensor.device.type == "cpu"
    assert not tensor.is_cuda
    assert tensor.get_device() == -1


def test_meta_tensors_stay_meta():
    assert torch.empty(3, device="meta").device.type == "meta"
    assert torch.zeros(3).to("meta").device.type == "meta"
    assert ones().to("meta").device.type == "meta"
    module = torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda")
    assert module.weight.is_cuda
    assert module.weight.isnan().all()


def test_there_is_one_device():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:1")


def test_pinned_memory_says_so():
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert torch.zeros(3).pin_memory().is_pinned()
    assert ones().to("cpu", non_blocking=True).is_pinned()
    assert not torch.zeros(3).is_pinned()
    assert not ones().is_pinned()


def test_copies_between_host_and_device_copy():
    host = torch.arange(4.0)
    device = host.to("cuda")
    device.add_(1)
    assert host.tolist() == [0, 1, 2, 3]
    back = device.cpu()
    device.zero_()
    assert back.tolist() == [1, 2, 3, 4]


def test_a_device_context_and_a_default_device_place_new_tensors():
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda
        assert torch.tensor([1, 2]).is_cuda
    assert not torch.zeros(3).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(3).is_cuda
        assert torch.arange(3).is_cuda
        assert torch.tensor([1, 2]).is_cuda
        assert not torch.zeros(3, device="cpu").is_cuda
        assert torch.nn.Linear(2, 2).weight.is_cuda
    finally:
        torch.set_default_device(None)
    assert not torch.zeros(3).is_cuda


def test_python_functions_of_torch_may_name_the_device_of_their_arguments():
    x = ones(6).view(2, 3)
    assert torch.nn.utils.rnn.pad_sequence([x, x[:1]]).is_cuda
    assert torch.cartesian_prod(ones(), ones()).is_cuda
    assert F.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], 3, 1, torch.ones(9, 3, device="cuda"), None, None, None, False, 0.0,
        torch.ones(3, 3, device="cuda"), None, need_weights=False,
    )[0].is_cuda  # fmt: skip


def test_mixed_devices_are_an_error_that_names_the_line():
    with pytest.raises(EmulationError, match="same device") as caught:
        ones() + torch.ones(4)
    assert caught.value.site.filename.endswith("test_emulated_devices.py")
    with pytest.raises(EmulationError, match="same device"):
        torch.stack([ones(1)[0], torch.tensor(1.0)])
    with pytest.raises(EmulationError, match="same device"):
        ones().clamp(min=torch.tensor(0.0))
    assert (ones() * torch.tensor(2.0)).tolist() == [2] * 4


def test_device_memory_does_not_become_numpy():
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        ones().numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(ones())
    assert ones().cpu().numpy().sum() == 4


def test_generators_say_where_they_are():
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert isinstance(generator, torch.Generator)
    first = torch.rand(4, device="cuda", generator=generator)
    again = torch.rand(4, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3))
    assert torch.equal(first, again)
    with pytest.raises(EmulationError, match="generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())


def test_seeding_the_device_repeats_its_numbers():
    torch.cuda.manual_seed(5)
    first = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(5)
    assert torch.equal(first, torch.rand(4, device="cuda"))


def test_the_device_answers_what_programs_ask():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).major == 9
    assert torch.cuda.get_device_properties("cuda").multi_processor_count > 0
    assert isinstance(torch.cuda.get_device_name(), str)
    assert torch.cuda.current_stream().cuda_stream == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.device(0):
        pass
    torch.cuda.nvtx.range_push("region")
    torch.cuda.nvtx.range_pop()


def test_memory_accounts_follow_allocations():
    gc.collect()  # what earlier tests left in cycles
    before = torch.cuda.memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1 << 20
    assert torch.cuda.max_memory_allocated() >= before + (1 << 20)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert any(segment["address"] == x.data_ptr() for segment in torch.cuda.memory_snapshot())
    del x
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


@pytest.fixture
def sync_debug():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "read",
    [
        "x.sum().item()",
        "x.tolist()",
        "x.cpu()",
        "x.to('cpu')",
        "bool(x[0])",
        "int(x.max())",
        "x.nonzero()",
        "x[x > 0]",
        "torch.equal(x, x + 1)",
        "torch.tensor([1.0], device='cuda')",
        "x.copy_(torch.zeros(4))",
        "torch.zeros(4).cuda()",
        "x.__setitem__(1, 1.0)",
        "x[[0, 2]]",
        "torch.repeat_interleave(x, x.long())",
        "torch.cuda.current_stream().synchronize()",
        "repr(x)",
    ],
)
def test_sync_debug_mode_reports_host_syncs_in_eager_code(read, sync_debug):
    with pytest.raises(HostSyncError, match="waits for the device"):
        eval(read, globals(), {"x": ones()})


@pytest.mark.parametrize(
    "work",
    [
        "x + 1",
        "x.fill_(2)",
        "torch.zeros(4).pin_memory().to('cuda', non_blocking=True)",
        "x.copy_(torch.zeros(4), non_blocking=True)",
        "x.copy_(torch.zeros(4).pin_memory(), non_blocking=True)",
        "x[1:3].zero_()",
        "torch.nonzero_static(x, size=4)",
        "F.softmax(x, -1)",
        "x.to('cpu', non_blocking=True)",
        "torch.arange(4, device='cuda')[:2]",
    ],
)
def test_sync_debug_mode_is_silent_about_device_work(work, sync_debug):
    assert eval(work, globals(), {"x": ones()}) is not None


def test_sync_debug_mode_can_warn():
    torch.cuda.set_sync_debug_mode("warn")
    try:
        assert torch.cuda.get_sync_debug_mode() == 1
        with pytest.warns(UserWarning, match="synchronizing"):
            assert ones().sum().item() == 4
    finally:
        torch.cuda.set_sync_debug_mode(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ones().sum().item()


def test_an_error_names_the_operation_the_line_the_effect_and_the_cure(capture):
    x = ones()

    def forward():
        return x * x.sum().item()

    with pytest.raises(CaptureError) as caught:
        capture(forward)
    error = caught.value
    assert "item" in error.operation
    assert error.site.function == "forward"
    assert error.site.line == forward.__code__.co_firstlineno + 1
    assert "operation not permitted" in error.cuda
    assert "keep the value on the device" in error.cure
    line = str(error)
    assert "\n" not in line
    for part in (error.operation, str(error.site), error.cuda, error.cure):
        assert part in line


def test_errors_survive_the_way_to_another_process(capture):
    import pickle

    with pytest.raises(CaptureError) as caught:
        capture(lambda: ones().sum().item())
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (type(twin), str(twin), twin.site) == (CaptureError, str(caught.value), caught.value.site)
