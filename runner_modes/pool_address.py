"""The addresses of pools: some pools of ordinary size are placed across a multiple of 4 GiB. The pool of a large server
always contains such an address, the small pool of a test almost never. Addresses below and above it differ in their
upper words: a kernel that adds an offset to the lower word, or compares lower words, is wrong only there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.derived_parameters import address_varies
from attn_testkit.environment import memory_across_4_gib

_QUARTERS = 4
_ALIGNED = 512
"""Bytes to which a device aligns memory."""
_anywhere = ContextVar("pools_anywhere", default=False)


@contextmanager
def pools_anywhere(wanted: bool = True) -> Iterator[None]:
    """Allocate pools as usual inside the block, whatever the case says, if ``wanted``."""
    token = _anywhere.set(wanted)
    try:
        yield
    finally:
        _anywhere.reset(token)


def allocate_for(case: Case, parts: int, *, cleared: bool = True) -> Callable[..., torch.Tensor]:
    """The function that allocates a pool, as ``torch.zeros`` or, unless ``cleared``, ``torch.empty`` does.

    If the case asks for it, the first piece of memory crosses a multiple of 4 GiB in the middle of one of its
    ``parts``, which have equal sizes, so that the part has slots on both sides. If there is no room, the address is
    arbitrary.
    """
    usual = torch.zeros if cleared else torch.empty
    quarter = case.derived("pool-address") if address_varies(case) and not _anywhere.get() else 0
    if not quarter or not parts:
        return usual
    middle = (math.floor((quarter - 0.5) / _QUARTERS * parts) + 0.5) / parts
    made = list[torch.Tensor]()

    def make(shape: int | Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(sizes) * dtype.itemsize
        below = int(nbytes * middle) // _ALIGNED * _ALIGNED
        memory = None if made or not below else memory_across_4_gib(nbytes, below)
        if memory is None:
            return usual(sizes, dtype=dtype, device=device)
        made.append(memory)
        if cleared:
            memory.zero_()
        return memory.view(dtype).view(sizes)

    return make
