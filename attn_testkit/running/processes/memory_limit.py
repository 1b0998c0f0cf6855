"""Memory limit for a case that reserves many gigabytes of addresses and uses only a few of them. Nothing else may
reserve as much."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .host_memory import ADDRESSES, bytes_of_process


@contextmanager
def no_more_than(more: int) -> Iterator[None]:
    """Limit this process to ``more`` bytes in addition to what it has. If it needs more, its allocator fails.

    Without the limit, writes to memory that the machine does not have make the system end some process. It does nothing
    if the system does not report how large a process is.
    """
    size = bytes_of_process(ADDRESSES)
    if not size:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = size + more
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
