"""Checks of bits: the same batch again, and the same request in other company."""

from __future__ import annotations

import torch

from ..contract import Execution
from ..results import Finding
from .check import Check, Stage
from .judgement import BITS
from .observation import Observation

__all__ = ["CHECKS", "batch_invariant", "repeatable"]


def _differs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; ``a`` and ``b`` have one shape and dtype."""
    a, b = (tensor.contiguous().view(BITS[tensor.dtype.itemsize]) for tensor in (a, b))
    return int((a != b).sum())


def repeatable(first: Observation, second: Observation) -> list[Finding]:
    """Two runs of one step agree in every bit of every layer."""
    for layer, (a, b) in enumerate(zip(first.attention, second.attention, strict=True)):
        count = _differs(a, b)
        if count:
            return [
                Finding(
                    "repeatable",
                    "the same batch gave other bits the second time, and determinism is claimed",
                    where=f"{first.schedule.case.layers.name(layer)}: {count} of {a.numel()} values differ",
                    hint="atomics, a split count that varies, or a counter that the first run left dirty",
                )
            ]
    return []


def batch_invariant(together: Observation, alone: Observation, index: int) -> list[Finding]:
    """Request ``index`` of ``together``, alone, gives the bits that it gave in the batch."""
    start = sum(request.new for request in together.step.requests[:index])
    rows = slice(start, start + together.step.requests[index].new)
    for layer, (a, b) in enumerate(zip(together.attention, alone.attention, strict=True)):
        count = _differs(a[rows], b)
        if count:
            return [
                Finding(
                    "batch-invariant",
                    f"request {index} gives other bits alone than in a batch of {together.step.bs}",
                    where=f"{alone.schedule.case.layers.name(layer)}: {count} of {b.numel()} values differ",
                    hint="a tile size or split count that depends on the rest of the batch",
                )
            ]
    return []


CHECKS = (
    Check(
        "repeatable",
        "Where claimed: the same batch gives the same bits each time.",
        "Atomic adds, a split count that depends on timing, a counter that is not reset.",
        "flash-attention 1a58058a; sglang #26412",
        "The same step twice on one instance: look for counters left dirty, atomics, memory not cleared.",
        judged_from=Stage.COMPLETED,
        applies=lambda claims, execution: claims.deterministic and execution is Execution.EAGER,
    ),
    Check(
        "batch-invariant",
        "Where claimed: a request gives the same bits whatever else is in the batch.",
        "A split count or tile size chosen from the batch.",
        "flash-attention #2450; aiter #4378",
        "A request alone and in company: look for sizes and splits that are taken from the batch.",
        judged_from=Stage.COMPLETED,
        applies=lambda claims, execution: claims.batch_invariant and execution is Execution.EAGER,
        shown_by=lambda case: case.bs > 1,
    ),
)
"""In the order in which they are worth reading. Found by comparing two runs."""
