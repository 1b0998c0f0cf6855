"""Device memory of one backend instance: facts for the record of a case-run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from attn_testkit.environment import allocations, memory_peak
from attn_testkit.watches.past_modes import past_modes


def allocated() -> int:
    """Bytes of device memory that are allocated now. Those of a library's own ``cudaMalloc`` are not counted."""
    with past_modes():
        return int(torch.cuda.memory_allocated())


def _allocations() -> int:
    with past_modes():
        return allocations()


@dataclass
class MemoryUse:
    """Bytes and allocations of device memory, counted around calls of the backend."""

    facts: dict[str, int] = field(default_factory=lambda: {"persistent": 0, "growth": 0})
    """Values of ``CaseResult.memory``."""
    grown: int = 0
    """Bytes that the last step left allocated, more than there were before it."""
    _measured: set[str] = field(default_factory=set)

    @contextmanager
    def kept(self, name: str) -> Iterator[None]:
        """Add the bytes that the block leaves allocated to a fact."""
        before = allocated()
        yield
        self.facts[name] = self.facts.get(name, 0) + allocated() - before

    @contextmanager
    def peak(self, work: str) -> Iterator[None]:
        """Note the most bytes that the block has allocated at a time. ``work``: only its first block is measured."""
        if work in self._measured:
            yield
            return
        self._measured.add(work)
        with memory_peak() as above:
            yield
            with past_modes():
                self.facts["peak"] = max(self.facts.get("peak", 0), above())

    @contextmanager
    def plan(self) -> Iterator[None]:
        """Note the number of allocations in a plan for a replay; the largest of all plans counts."""
        before = _allocations()
        yield
        made = _allocations() - before
        self.facts["plan_allocations"] = max(self.facts.get("plan_allocations", 0), made)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Note the bytes that a step leaves allocated."""
        before = allocated()
        yield
        self.grown = allocated() - before
        if "graphs" not in self.facts:
            # A capture may free what an earlier step allocated, and a later step allocate it again: cuBLAS's workspace.
            self.facts["persistent"] += self.grown
