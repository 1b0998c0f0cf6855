"""A case that takes many gigabytes of addresses, of which it uses little: nothing else may take as much beside it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .host_memory import ADDRESSES, bytes_of_process

__all__ = ["no_more_than"]


@contextmanager
def no_more_than(more: int) -> Iterator[None]:
    """Inside, a process cannot ask for more than so many bytes beside what it has: its allocator says no.

    Where memory is written that the machine has not, the system ends some process. Does nothing where the system does
    not say how large a process is.
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
