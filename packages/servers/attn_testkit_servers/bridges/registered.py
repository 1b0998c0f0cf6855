"""Memory that peers in one process have registered for transfers, which is found by its address."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable

import torch


class Registered:
    """Memory that a transfer engine may read and write."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, torch.Tensor]] = []
        """Address and bytes of each allocation, in the order of addresses."""

    def add(self, parts: Iterable[torch.Tensor]) -> None:
        """Register the allocations in which tensors lie."""
        for part in parts:
            memory = part.untyped_storage()
            if all(memory.data_ptr() != start for start, _ in self._regions):
                flat = torch.empty(0, dtype=torch.uint8, device=part.device).set_(memory)
                bisect.insort(self._regions, (memory.data_ptr(), flat), key=lambda each: each[0])

    def copy(self, sources: Iterable[int], targets: Iterable[int], lengths: Iterable[int]) -> None:
        """Copy bytes between addresses. Raises ``RuntimeError`` if one is in no registered memory."""
        alike = defaultdict[tuple[int, int, int], list[tuple[int, int]]](list)
        for source, target, length in zip(sources, targets, lengths, strict=True):
            here, there = self._region(source, length), self._region(target, length)
            alike[here, there, length].append((source - self._regions[here][0], target - self._regions[there][0]))
        for (here, there, length), places in alike.items():
            held, written = self._regions[here][1], self._regions[there][1]
            steps = torch.arange(length)
            at, to = ((torch.tensor(each)[:, None] + steps).flatten() for each in zip(*places, strict=True))
            written[to.to(written.device)] = held[at.to(held.device)]

    def _region(self, address: int, length: int) -> int:
        index = bisect.bisect_right(self._regions, address, key=lambda each: each[0]) - 1
        if index < 0 or address + length > self._regions[index][0] + len(self._regions[index][1]):
            raise RuntimeError(f"{length} bytes from address {address:#x} on are in no memory that was registered")
        return index
