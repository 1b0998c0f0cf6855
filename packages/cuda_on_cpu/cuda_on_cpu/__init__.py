"""CUDA graphs on a CPU: ordinary CUDA programs run unmodified, and break where they would break on a GPU.

Modules import downwards, from `context` (the entry) to state that imports no other module. All state that outlives a
call:

    session._local                  each thread's session: set only by `emulated_cuda`, on entry and exit
    installation.INSTALLED          names replaced in torch while a thread is inside; if this process has frozen its
                                    garbage and tested its torch; how often code ran eagerly that a compiler would
                                    have compiled. Changed only by `emulated_cuda`
    tags.DEVICE, tags.PINNED        storages that are device or pinned memory: entered when they are made, removed
                                    when they are gone; kept between contexts, because tensors outlive them
    pools._pools                    memory pools by handle, held weakly: made by the first capture that names one
    pools._numbers                  the next pool handle
    triton_bounds._local            each thread's launch of a Triton kernel: set while it runs
    streams._handles                the next handle of a stream or an event
    torch_cuda._DEFAULT_GENERATOR   the seed of `torch.cuda.manual_seed`; numbers come from torch's CPU generator

Anything else at the top of a module is a constant, or a `functools.cache` of facts of a schema or a library version.
"""

from cuda_on_cpu.context import emulated_cuda
from cuda_on_cpu.errors import (
    CaptureError,
    DanglingMemoryError,
    EmulationError,
    HostSyncError,
    RaceError,
    StrayAccessError,
)
from cuda_on_cpu.installation import compiled_regions_run
from cuda_on_cpu.launch_log import note_grids, note_launches
from cuda_on_cpu.policy import LIMITS, Policy
from cuda_on_cpu.session import is_active, present_policy
from cuda_on_cpu.streams import orderly_stream
from cuda_on_cpu.tags import DEVICE, allocations_made
from cuda_on_cpu.triton_bounds import confine
from cuda_on_cpu.triton_races import scratch

add_device_memory = DEVICE.add
peak_above = DEVICE.peak_above

__all__ = [
    "LIMITS",
    "CaptureError",
    "DanglingMemoryError",
    "EmulationError",
    "HostSyncError",
    "Policy",
    "RaceError",
    "StrayAccessError",
    "add_device_memory",
    "allocations_made",
    "compiled_regions_run",
    "confine",
    "emulated_cuda",
    "is_active",
    "note_grids",
    "note_launches",
    "orderly_stream",
    "peak_above",
    "present_policy",
    "scratch",
]
