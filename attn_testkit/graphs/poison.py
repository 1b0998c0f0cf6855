"""Exposure of stale addresses: churn the heap after capture, and fill every freed block with NaN.

Captured kernels read addresses, not tensors. A workspace that was freed after capture keeps its old values until the
block is allocated again; a test without further allocations sees nothing. Here the kit takes every free block of the
allocator, fills it with 0xFF (NaN in every float dtype, -1 in every integer) and holds it. A replay that reads one
returns NaN or faults; a replay that writes one is caught by the canary, even when its own output is right.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .allocator import free_blocks

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_BYTES = 256 << 20
"""Most bytes to fill: the allocator may hold gigabytes of free blocks from earlier cases."""
_WATCHED_BYTES = 8 << 20
"""Size up to which canaries are compared after every replay; larger ones only poison reads."""


def fill_with_poison(tensor: torch.Tensor, byte: int = 0xFF) -> None:
    """Fill every byte of the tensor's elements with 0xFF: NaN, or -1; True for bool. Works for strided views.

    A second run with another ``byte`` tells unchanged values from computed ones.
    """
    target, value = poisoned(tensor, byte)
    target.fill_(value)


def poisoned(tensor: torch.Tensor, byte: int = 0xFF) -> tuple[torch.Tensor, int]:
    """A view of the tensor, and the value that fills it with poison."""
    dtype = tensor.dtype
    if dtype == torch.bool:
        return tensor, True
    # Through integers, so that the very bits are known: a computed NaN has others, and a row that still holds these was
    # never written.
    return tensor.view(_INTEGERS[dtype.itemsize]), int.from_bytes(bytes([byte] * dtype.itemsize), "little", signed=True)


_FRESH = (512 << 10,) * 8 + (9 << 20,) * 4 + (64 << 20,)
"""Sizes that together fill new segments of the allocator's small and large pools."""


def dirty_fresh_memory(byte: int = 0xFF) -> None:
    """Make the blocks that an allocator hands out next hold ``byte``, as far as its free blocks go.

    A young process gets zeroed pages, so a workspace or counter that must be zero but is never cleared works only there
    (flashinfer #1444).
    """
    with contextlib.suppress(RuntimeError):  # no memory, or a lost context: what runs next reports it
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in _FRESH]
        for block in blocks:
            block.fill_(byte)


_UNINITIALISED = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


class FreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which every tensor that torch creates uninitialized holds ``byte`` instead of old values.

    For re-runs after a failure: it costs some microseconds per operator. Not for a capture, where it would record
    kernels that the backend does not launch. Compiled code runs as compiled, and its own allocations are not seen.
    """

    def __init__(self, byte: int = 0xFF) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.byte = byte

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer without torch, which would import dynamo for a second to find out that nothing is compiled here."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile working: otherwise it would run functions eagerly that are called inside the mode, and
        never compile them again in this process."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALISED and not torch.cuda.is_current_stream_capturing():
            fill_with_poison(made, self.byte)
        return made


def fresh_memory(byte: int = 0xFF) -> FreshMemory:
    """A ``FreshMemory`` that torch.compile, if it is imported, does not trace into."""
    return (_untraced() if "torch._dynamo" in sys.modules else FreshMemory)(byte)


@functools.cache
def _untraced() -> type[FreshMemory]:
    class Untraced(FreshMemory):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return True

        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__torch_dispatch__(*args, **kwargs)

    return Untraced


@dataclass
class Canaries:
    """Blocks that were free after capture, now allocated and full of poison."""

    blocks: list[torch.Tensor]
    _side_by_side: torch.Tensor | None = field(default=None, init=False, repr=False)

    def extremes(self) -> tuple[tuple[torch.Tensor, int], ...]:
        """Bytes of the smallest and the largest word of all watched blocks, on the device, and how many bytes.

        It uses three kernels, because there may be hundreds of blocks. None if there is no block.
        """
        # The allocator's blocks are multiples of 512 bytes.
        wide = [block.view(torch.int64) for block in self._watched()]
        if not wide:
            return ()
        size = sum(block.numel() for block in wide)
        if self._side_by_side is None or self._side_by_side.numel() < size:
            # Kept: memory that is free again would be a canary of the next churn, and this would reserve more.
            self._side_by_side = torch.empty(size, dtype=torch.int64, device="cuda")
        copied = torch.cat(wide, out=self._side_by_side[:size])
        return ((torch.stack(torch.aminmax(copied)).view(torch.uint8), 16),)

    def damaged(self, extremes: npt.NDArray[np.uint8]) -> tuple[str, ...]:
        """Messages about blocks that were written to. ``extremes``: the bytes that the method ``extremes`` returns, on
        the host.

        Poisons the blocks again, so that each damage is reported once.
        """
        if (extremes == 0xFF).all():
            return ()
        messages = []
        for block in self._watched():
            count = int((block != 0xFF).sum())
            if count:
                messages.append(f"{count} of {block.numel()} bytes of a freed block overwritten")
                block.fill_(0xFF)
        return tuple(messages)

    def _watched(self) -> list[torch.Tensor]:
        return [block for block in self.blocks if block.numel() <= _WATCHED_BYTES]


def _on_stream(address: int) -> contextlib.AbstractContextManager[object]:
    """Allocate as the stream with this address would; 0 is the default stream."""
    if not address:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(address))  # type: ignore[no-untyped-call]


def churn() -> Canaries:
    """Allocate every free block of the default pool, poison it, and keep it."""
    blocks: list[torch.Tensor] = []
    left = _MOST_BYTES
    for size, stream in free_blocks():
        if size <= left:
            left -= size
            # A free block is given to the stream that it was allocated on, and to no other: what a warm-up made and
            # somebody freed lies with the warm-up's stream.
            with _on_stream(stream):
                blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    for taken in blocks:
        taken.fill_(0xFF)
    return Canaries(blocks)
