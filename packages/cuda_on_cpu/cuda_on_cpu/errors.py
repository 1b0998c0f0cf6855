"""Errors for programs that would fail on a GPU. Every error names the operation, the author's line, CUDA's behavior,
and the usual remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu.sites import UNKNOWN, Site

_METHOD = type(Tensor.add)


def spell(func: Any) -> str:
    """Name of a function of torch, as an author writes it."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(func)
    name = getattr(func, "__name__", "")
    owner = "Tensor" if type(func) is _METHOD or name.startswith("__") else "torch"
    return f"{owner}.{name}"


class EmulationError(RuntimeError):
    """Base class; also raised itself for programs that fail on a GPU without a graph, such as mixed devices.

    `operation` is the call as the author wrote it, `site` its line, `cuda` what CUDA or torch would have done, `cure`
    the usual remedy. The message says all four. It can be pickled.
    """

    def __init__(self, operation: str, site: Site = UNKNOWN, cuda: str = "", cure: str = "") -> None:
        self.operation = operation
        self.site = site
        self.cuda = cuda
        self.cure = cure
        super().__init__(f"{operation} at {site}: {cuda}. Cure: {cure}")

    def __reduce__(self) -> tuple[type[EmulationError], tuple[str, Site, str, str]]:
        return type(self), (self.operation, self.site, self.cuda, self.cure)


class CaptureError(EmulationError):
    """CUDA would have refused this while a graph is being captured."""


class HostPointerError(EmulationError, ValueError):
    """A kernel was given the address of host memory; Triton raises ValueError."""


class StrayAccessError(EmulationError):
    """A kernel writes memory that it was not given, or reads far from all that it was given."""


class RaceError(EmulationError):
    """Two programs of one launch use the same memory, one of them writes, and nothing orders them."""


class HostSyncError(EmulationError):
    """`torch.cuda.set_sync_debug_mode("error")` is on and the host would have waited for the device."""


class DanglingMemoryError(EmulationError):
    """A graph is about to use memory that was freed, moved or resized after it was captured."""
