"""The device's caching allocator: its free blocks, and memory that it reserves unnecessarily."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_SMALL = 1 << 20
"""Largest request that the caching allocator serves from small segments; larger ones come from large segments."""


def free_blocks() -> Iterator[tuple[int, int]]:
    """(bytes, stream's address) of requests that use the default pool's free blocks without reserving more."""
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        # Private pools (of captured graphs) are not ours to take from.
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        small = segment.get("segment_type") == "small"
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            if small:
                # An empty small segment is larger than any request that it serves.
                whole, rest = divmod(block["size"], _SMALL)
                yield from ((size, segment.get("stream", 0)) for size in (*[_SMALL] * whole, rest) if size)
            elif block["size"] > _SMALL:
                yield block["size"], segment.get("stream", 0)


_IDLE_BYTES = 1 << 30
"""Bytes of reserved and unused device memory above which it is freed."""


def give_back_idle_memory() -> None:
    """Give reserved and unused memory of the allocator back to the device, if it is more than 1 GiB.

    The pool of a deleted graph stays reserved until an allocation outside a capture finds no memory. A capture cannot
    wait for that and fails: eighteen processes of some 150 graph case-runs each filled an H200 in this way.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _IDLE_BYTES:
        torch.cuda.empty_cache()
