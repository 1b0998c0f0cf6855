"""What has to be true of the process before vLLM is imported, where no GPU is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from attn_testkit.backends.vendor.provider import device_is_real

from .claims import Claims

__all__ = ["prepare"]

_COMPILED = (
    "vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C",
)  # fmt: skip
"""Modules of vLLM that load a CUDA library when they are imported, and define operators."""


def prepare(claims: Claims) -> bool:
    """Set vLLM's environment variables, and without a GPU let its imports pass. Returns whether there is none.

    Safe to call again. Raises ``RuntimeError`` where vLLM was imported already and decided otherwise.
    """
    for name, value in claims.environment.items():
        if os.environ.get(name) != value and "vllm.envs" in sys.modules:
            raise RuntimeError(f"vLLM was imported before {name}={value} was set; a process has one of these backends")
        os.environ[name] = value
    if device_is_real(torch.device("cuda")):
        return False
    for module in _COMPILED:
        sys.modules.setdefault(module, ModuleType(module))
    with _no_visible_device():
        import vllm.platforms
        from vllm.platforms.cuda import NonNvmlCudaPlatform

        # Otherwise NVML decides. This one asks torch.cuda for everything, so the emulated device answers.
        if not isinstance(vllm.platforms._current_platform, NonNvmlCudaPlatform):
            vllm.platforms._current_platform = NonNvmlCudaPlatform()
        import vllm.triton_utils

        if not vllm.triton_utils.HAS_TRITON:
            raise RuntimeError("vLLM was imported before the bridge, and has switched Triton off for want of a driver")
    from . import fakes

    fakes.put_in_place()
    return True


@contextmanager
def _no_visible_device() -> Iterator[None]:
    """``vllm.triton_utils`` replaces Triton where it finds no driver, unless devices are hidden."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with _torch_left_alone():
            yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def _torch_left_alone() -> Iterator[None]:
    """``vllm.platforms.cuda`` switches a kernel of torch's attention off for its process, which is another here."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
