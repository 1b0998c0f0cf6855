"""Triton's driver without a GPU: the functions that packages call at their import, and tuners when they tune. Inside
the emulation `triton.runtime.driver.active` is the driver of the emulated device. Outside it is the stock driver; if
that raises because the machine has no GPU, and kernels run in the interpreter, the emulated driver is used there too,
from the first context of a process on. Packages ask once, at their import, and keep the answer.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cuda_on_cpu import session
from cuda_on_cpu.device import CAPABILITY, DeviceProperties
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.sites import author_site

_INTERPRETER = "triton.runtime.interpreter"


def interpreter() -> Any:
    """Triton's interpreter module when this process uses it, else None. Triton is not imported otherwise."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in ("1", "true", "on", "yes", "y"):
        return sys.modules.get(_INTERPRETER)
    try:
        return importlib.import_module(_INTERPRETER)
    except ImportError:
        return None


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise EmulationError(
        "a compiled triton kernel",
        author_site(),
        "there is no GPU that could run it, and no compiler was asked",
        "set TRITON_INTERPRET=1 before triton is imported: kernels then run in Triton's interpreter",
    )


def first_is_best(kernel_call: Callable[[], object], *_: Any, quantiles: Sequence[float] = (), **__: Any) -> Any:
    """A benchmark that does not run the kernel: there is nothing to time, and the first configuration is as good as
    any."""
    return [0.0] * len(quantiles) if len(quantiles or ()) > 1 else 0.0


class _Utils:
    """The functions of the driver's C module that programs call."""

    load_binary = staticmethod(_refuse)
    unload_module = staticmethod(_refuse)
    launch = staticmethod(_refuse)

    @staticmethod
    def get_device_properties(device: int = 0) -> dict[str, int]:
        """Properties of the device under Triton's names; clocks in kHz."""
        of = DeviceProperties
        return {
            "max_shared_mem": of.shared_memory_per_block_optin,
            "max_num_regs": of.regs_per_multiprocessor,
            "multiprocessor_count": of.multi_processor_count,
            "warpSize": of.warp_size,
            "sm_clock_rate": of.clock_rate,
            "mem_clock_rate": of.memory_clock_rate,
            "mem_bus_width": of.memory_bus_width,
        }

    @staticmethod
    def get_device_capability(device: int = 0) -> tuple[int, int]:
        """(major, minor)."""
        return CAPABILITY

    @staticmethod
    def get_current_device() -> int:
        """Number of the only device."""
        return 0


class EmulatedDriver:
    """The driver of the emulated device, with the methods of Triton's CUDA driver."""

    utils = _Utils()
    launcher_cls = staticmethod(_refuse)

    @staticmethod
    def is_active() -> bool:
        """True: the driver can always be used."""
        return True

    def get_current_target(self) -> Any:
        """Target that kernels would be compiled for."""
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], DeviceProperties.warp_size)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """(major, minor)."""
        return CAPABILITY

    def get_current_device(self) -> int:
        """Number of the only device."""
        return 0

    def set_current_device(self, device: Any) -> None:
        """Nothing to do: there is one."""

    def get_current_stream(self, device: Any = None) -> int:
        """The handle of the thread's current stream; that of the default one outside the emulation."""
        current = session.current()
        return 0 if current is None else current.stream.cuda_stream

    def get_active_torch_device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """torch's module of the device."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        """Function with which tuners time configurations."""
        return first_is_best

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """An empty buffer for `clear_cache`, because there is no cache."""
        return torch.empty(0, dtype=torch.int32, device="cuda")

    def clear_cache(self, cache: Any) -> None:
        """Nothing to do."""

    def map_python_to_cpp_type(self, ty: str) -> str:
        """The C++ type of one of Triton's."""
        return str(importlib.import_module("triton.backends.nvidia.driver").ty_to_cpp(ty))

    def assemble_tensormap_to_arg(self, tensormaps_info: Any, args: Any) -> Any:
        """The arguments as they are."""
        return args


class _Answer(property):
    """`DriverConfig.active` or `.default`, answered without a GPU."""


def answer_without_a_gpu() -> None:
    """Install the emulated driver as the module describes, for good, if this process uses the interpreter."""
    if interpreter() is None:
        return
    config = getattr(sys.modules.get("triton.runtime.driver"), "DriverConfig", None)
    emulated = EmulatedDriver()
    for name in ("active", "default"):
        stock = vars(config).get(name)
        if type(stock) is property and stock.fget is not None:
            setattr(config, name, _Answer(_answer(stock.fget, emulated)))


def _answer(stock: Callable[[Any], Any], emulated: EmulatedDriver) -> Callable[[Any], Any]:
    def answer(self: Any) -> Any:
        if session.is_active():
            return emulated
        try:
            return stock(self)
        except Exception:
            if interpreter() is None or torch.cuda.is_available():
                raise
            return emulated

    return answer
