"""Preparation of the process before vLLM is imported, without a GPU or if a compiled module does not load."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from attn_testkit.backends.vendor.provider import device_is_real

from .capabilities import BridgeCapabilities

STABLE, FA2, FA3 = "vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"
MLA, MLA_FP8 = "vllm._flashmla_C", "vllm._flashmla_extension_C"
COMPILED = (STABLE, FA2, FA3, MLA, MLA_FP8)
"""Modules of vLLM that load a CUDA library when they are imported, and define operators."""


@dataclass(frozen=True)
class Machine:
    """Properties of the machine that vLLM depends on."""

    without_gpu: bool
    missing: Mapping[str, str] = field(default_factory=dict)
    """Compiled module -> reason why it does not load, on a GPU."""


def prepare(declared: BridgeCapabilities) -> Machine:
    """Set vLLM's environment variables, and let its imports pass if there is no GPU or a compiled module is missing.

    Safe to call again. Raises ``RuntimeError`` if vLLM was imported already and decided otherwise.
    """
    for name, value in declared.environment.items():
        if os.environ.get(name) != value and "vllm.envs" in sys.modules:
            raise RuntimeError(
                f"vLLM was imported before {name}={value} was set; a process can have only one of these backends"
            )
        os.environ[name] = value
    os.environ.update(_NO_SYMMETRIC_MEMORY)
    from . import fakes

    if device_is_real(torch.device("cuda")):
        for module in COMPILED:
            if module not in _missing and (why := _why_not(module)):
                _missing[module] = why
                # vLLM imports it by name, for operators that it registers.
                sys.modules[module] = ModuleType(module)
        if STABLE in _missing:
            fakes.define_operators()
        return Machine(False, dict(_missing))
    for module in COMPILED:
        sys.modules.setdefault(module, ModuleType(module))
    with _no_visible_device():
        import vllm.platforms
        from vllm.platforms.cuda import NonNvmlCudaPlatform

        # Otherwise NVML decides. This one asks torch.cuda for everything, so the emulated device answers.
        if not isinstance(vllm.platforms._current_platform, NonNvmlCudaPlatform):
            vllm.platforms._current_platform = NonNvmlCudaPlatform()
        import vllm.triton_utils

        if not vllm.triton_utils.HAS_TRITON:
            raise RuntimeError(
                "vLLM was imported before the bridge, and has disabled Triton because it found no driver"
            )
    fakes.put_in_place()
    return Machine(True)


_NO_SYMMETRIC_MEMORY = {"VLLM_USE_DIRECT_DCP_Q_GATHER": "0", "VLLM_USE_DIRECT_DCP_KV_GATHER": "0"}
"""Ranks in one process have no memory that several processes share. vLLM reads these when it makes a layer."""
_missing: dict[str, str] = {}
_MOST = 200
"""Most characters of an import's error, which for a library names every symbol."""


def _why_not(module: str) -> str:
    """Reason why a compiled module does not load: this installation lacks it, or it was built for another torch.

    Found without importing it: the package around two of them remembers the result of its first import.
    """
    found = importlib.util.find_spec("vllm")
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    inner = Path(*module.split(".")[1:])
    libraries = [path for folder in folders for path in sorted((folder / inner.parent).glob(f"{inner.name}.*so"))]
    if not libraries:
        return "it is not installed"
    try:
        ctypes.CDLL(str(libraries[0]))
    except OSError as error:
        return f"OSError: {' '.join(str(error).split())[:_MOST]}"
    return ""


@contextmanager
def _no_visible_device() -> Iterator[None]:
    """``vllm.triton_utils`` replaces Triton if it finds no driver, unless devices are hidden."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
