"""The vendor seam: the real thing where it runs, a fake bound to the real signature elsewhere."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from attn_testkit.backends.vendor import (
    EntryPoint,
    VendorMismatch,
    VendorMissing,
    device_is_real,
    fake_of,
    forced,
    provide,
    swapped,
)
from cuda_on_cpu import emulated_cuda

CUDA = torch.device("cuda", 0)


class RealWrapper:
    def __init__(self, workspace: int, layout: str = "NHD") -> None: ...

    def plan(self, indptr: int, *, scale: float = 1.0) -> str:
        return "real"


class FakeWrapper:
    def __init__(self, workspace: int, layout: str = "NHD") -> None:
        self.layout = layout

    def plan(self, indptr: int, *, scale: float = 1.0) -> str:
        return f"fake {indptr} {scale} {self.layout}"


class WrapperOfAnotherVersion:
    def begin_forward(self) -> None: ...


def real_decode(query: int, table: int, scale: float = 0.5) -> str:
    return "real"


def decode_in_torch(query: int, table: int, scale: float = 0.5) -> str:
    return f"fake {query} {table} {scale}"


def make_derived(original: type) -> type:
    return type("Derived", (original,), {"plan": lambda self, indptr: f"derived {indptr}"})


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vendor's package, and fakes of it."""
    module = ModuleType("a_vendor")
    module.__dict__.update(Wrapper=RealWrapper, decode=real_decode)
    monkeypatch.setitem(sys.modules, "a_vendor", module)
    monkeypatch.setitem(sys.modules, "a_vendor_fakes", sys.modules[__name__])
    return module


def entry(path: str, fake: str, sm: tuple[tuple[int, int], ...] = ((90, 90),)) -> EntryPoint:
    return EntryPoint(f"a_vendor:{path}", sm, f"a_vendor_fakes:{fake}", "vendor")


DECODE = entry("decode", "decode_in_torch")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_an_emulated_device_is_not_real() -> None:
    assert not device_is_real(torch.device("cpu"))
    with emulated_cuda():
        assert torch.cuda.is_available()
        assert not device_is_real(CUDA)


def test_a_device_in_range_gets_the_real_function(package: ModuleType, h200: None) -> None:
    provided = provide(DECODE, CUDA)
    assert (provided.call, provided.is_fake, provided.why) == (real_decode, False, "")


def test_a_device_out_of_range_gets_the_fake_and_the_reason(package: ModuleType, h200: None) -> None:
    provided = provide(entry("decode", "decode_in_torch", ((100, 103), (107, 107))), CUDA)
    assert provided.is_fake
    assert provided.why == "its kernels need SM100-103, SM107 and this device is SM90"


def test_a_call_is_bound_to_the_real_signature_and_gets_its_defaults(package: ModuleType) -> None:
    call = fake_of(DECODE)
    assert call(1, table=2) == "fake 1 2 0.5"
    with pytest.raises(TypeError, match="block_tables"):
        call(1, 2, block_tables=2)


def test_a_fake_that_takes_more_than_the_real_function_does_not_hide_it(package: ModuleType) -> None:
    package.__dict__["decode"] = lambda query, table: "real"
    call = fake_of(entry("decode", "decode_in_torch", ((80, 90),)))
    with pytest.raises(TypeError, match="scale"):
        call(1, 2, scale=1.0)


def test_constructor_and_methods_are_bound_too(package: ModuleType) -> None:
    wrapper = fake_of(entry("Wrapper", "FakeWrapper"))(8, layout="HND")
    assert wrapper.plan(3, scale=2.0) == "fake 3 2.0 HND"
    with pytest.raises(TypeError, match="window_left"):
        wrapper.plan(3, window_left=1)
    with pytest.raises(TypeError, match="backend"):
        fake_of(entry("Wrapper", "FakeWrapper"))(8, backend="fa2")


def test_a_fake_may_derive_from_the_real_class(package: ModuleType) -> None:
    assert fake_of(entry("Wrapper", "make_derived"))(8).plan(3) == "derived 3"


def test_a_method_that_the_package_lost_is_reported(package: ModuleType) -> None:
    with pytest.raises(VendorMismatch, match="RealWrapper has no begin_forward"):
        fake_of(entry("Wrapper", "WrapperOfAnotherVersion"))


def test_an_entry_point_that_the_package_lost_is_reported(package: ModuleType) -> None:
    with pytest.raises(VendorMismatch, match="has no a_vendor:prefill"):
        provide(entry("prefill", "decode_in_torch"), torch.device("cpu"))


def test_a_missing_package_names_the_extra() -> None:
    missing = EntryPoint("no_such_vendor:decode", ((90, 90),), "nowhere:decode", "flashinfer")
    with pytest.raises(VendorMissing, match=r"pip install 'PATH_OF_THE_CHECKOUT\[flashinfer\]'"):
        provide(missing, CUDA)


def test_either_kind_can_be_asked_for(package: ModuleType, h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with forced("fake"):
        assert provide(DECODE, CUDA).is_fake
        with forced("real"):
            assert not provide(DECODE, CUDA).is_fake
    assert not provide(DECODE, CUDA).is_fake
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with forced("real"), pytest.raises(VendorMissing, match="no CUDA device is here"):
        provide(DECODE, CUDA)


def test_swapped_names_come_back_and_lost_ones_are_reported(package: ModuleType) -> None:
    with swapped({"a_vendor:decode": decode_in_torch}):
        assert package.decode is decode_in_torch
    assert package.decode is real_decode
    with pytest.raises(VendorMismatch, match="a_vendor:get_module"), swapped({"a_vendor:get_module": None}):
        pass


_WITHOUT_THE_PACKAGE = """
import sys
sys.modules["flashinfer"] = None
from attn_testkit.backends.flashinfer import FlashInferBackend
from attn_testkit.backends.flashinfer_mla import FlashInferMLABackend
from attn_testkit.backends.vendor import VendorMissing, provide
from attn_testkit.backends.vendor.flashinfer_kernels import BATCH_DECODE
from cuda_on_cpu import emulated_cuda
import torch
assert FlashInferBackend.capabilities.requires.packages and FlashInferMLABackend.capabilities.graph
with emulated_cuda():
    try:
        provide(BATCH_DECODE, torch.device("cuda", 0))
    except VendorMissing as error:
        print(error)
"""


def test_an_adapter_tells_its_capabilities_without_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _WITHOUT_THE_PACKAGE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'PATH_OF_THE_CHECKOUT[flashinfer]'" in done.stdout
