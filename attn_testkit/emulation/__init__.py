"""CUDA graphs on a CPU: ordinary CUDA programs run unmodified, and break where they would break on a GPU."""

from attn_testkit.emulation.context import emulated_cuda
from attn_testkit.emulation.errors import CaptureError, DanglingMemoryError, EmulationError, HostSyncError
from attn_testkit.emulation.policy import LIMITS, Policy
from attn_testkit.emulation.session import is_active

__all__ = [
    "LIMITS",
    "CaptureError",
    "DanglingMemoryError",
    "EmulationError",
    "HostSyncError",
    "Policy",
    "emulated_cuda",
    "is_active",
]
