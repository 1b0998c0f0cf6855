"""A stream that is busy until the host is done: a kernel waits for a number that the host writes to pinned memory.

The kernel ends by itself after ``MOST_NS``, so a backend that waits for the device in the meantime does not wait for
ever.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .driver import driver_api, value_of

MOST_NS = 200_000_000
"""Nanoseconds after which a kernel ends, whatever the host does."""
_CYCLES = 200_000_000
"""Cycles of a wait without a host: about 100 ms."""
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry hold(.param .u64 done, .param .u64 most)
{
    .reg .pred %p<3>;
    .reg .u32 %r<2>;
    .reg .u64 %rd<6>;
    ld.param.u64 %rd1, [done];
    ld.param.u64 %rd2, [most];
    mov.u64 %rd3, %globaltimer;
AGAIN:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra END;
    nanosleep.u32 1000;
    mov.u64 %rd4, %globaltimer;
    sub.u64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p2, %rd5, %rd2;
    @%p2 bra AGAIN;
END:
    ret;
}
\0"""


def hold() -> Callable[[], None]:
    """Keep the current stream busy until the returned function is called, and at most ``MOST_NS``.

    Without the ``cuda-bindings`` package the stream waits a fixed time. Raises ``Refused`` if the driver does not load
    or launch the kernel.
    """
    driver = driver_api()
    if driver is None:
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call, unused-ignore]
        return lambda: None
    done = _done()
    done.fill(0)
    arguments = (done.ctypes.data, MOST_NS), (ctypes.c_void_p, ctypes.c_uint64)
    kernel, stream = _kernel(torch.cuda.current_device()), torch.cuda.current_stream().cuda_stream
    value_of(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
    return lambda: done.fill(1)


@lru_cache
def _done() -> Any:
    """int32 [1] in pinned memory, as a numpy array, so that watchers of torch operators do not see its use."""
    return torch.zeros(1, dtype=torch.int32).pin_memory().numpy()


@lru_cache
def _kernel(device: int) -> Any:
    """The kernel, loaded into the context of a device."""
    module = value_of(driver_api().cuModuleLoadData(_PTX))
    return value_of(driver_api().cuModuleGetFunction(module, b"hold"))
