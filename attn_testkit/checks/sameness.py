"""Promises of bits: the same batch again, and the same request in other company."""

from __future__ import annotations

import torch

from ..results import Finding
from .observation import Observation

__all__ = ["batch_invariant", "repeatable"]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _differs(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((_bits(a) != _bits(b)).sum())


def repeatable(first: Observation, second: Observation) -> list[Finding]:
    """Two runs of one step agree in every bit."""
    for layer, (a, b) in enumerate(zip(first.attention, second.attention, strict=True)):
        count = _differs(a, b)
        if count:
            return [
                Finding(
                    "repeatable",
                    "the same batch gave other bits the second time, and determinism is claimed",
                    where=f"layer {layer}: {count} of {a.numel()} values differ",
                    hint="atomics, a split count that varies, or a counter that the first run left dirty",
                )
            ]
    return []


def batch_invariant(together: Observation, alone: Observation, index: int) -> list[Finding]:
    """A request alone gives the bits that it gave in the batch."""
    start = sum(request.new for request in together.step.requests[:index])
    rows = slice(start, start + together.step.requests[index].new)
    for layer, (a, b) in enumerate(zip(together.attention, alone.attention, strict=True)):
        count = _differs(a[rows], b)
        if count:
            return [
                Finding(
                    "batch-invariant",
                    f"request {index} gives other bits alone than in a batch of {together.step.bs}",
                    where=f"layer {layer}: {count} of {b.numel()} values differ",
                    hint="a tile size or split count that depends on the rest of the batch",
                )
            ]
    return []
