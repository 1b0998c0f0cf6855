"""Properties of the emulated device."""

from __future__ import annotations

CAPABILITY = (9, 0)
NAME = "emulated cuda:0"
TOTAL_MEMORY = 1 << 34


class DeviceProperties:
    """Answer of `get_device_properties`: the shape of a Hopper GPU."""

    name = NAME
    major, minor = CAPABILITY
    total_memory = TOTAL_MEMORY
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = 50 << 20
    clock_rate = 1_980_000
    memory_clock_rate = 2_619_000
    memory_bus_width = 5120
    is_integrated = 0
    is_multi_gpu_board = 0
    gcnArchName = ""
