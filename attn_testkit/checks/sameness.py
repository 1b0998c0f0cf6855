"""Checks of bits: the same batch again, and the same request with other requests in the batch."""

from __future__ import annotations

import numpy as np
import torch

from ..contract import Execution
from ..results.finding import Finding
from .check import Check, Stage
from .comparison import BITS
from .observation import Observation

__all__ = ["CHECKS", "batch_invariant", "repeatable"]


def _differs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Count elements whose bits differ; ``a`` and ``b`` have one shape and dtype."""
    a, b = (tensor.contiguous().view(BITS[tensor.dtype.itemsize]) for tensor in (a, b))
    return int((a != b).sum())


def repeatable(first: Observation, second: Observation) -> list[Finding]:
    """Check that two runs of one step agree in every bit of every layer."""
    for layer, (a, b) in enumerate(zip(first.attention, second.attention, strict=True)):
        count = _differs(a, b)
        if count:
            return [
                Finding(
                    "repeatable",
                    "the same batch gave other bits the second time, although determinism is declared",
                    where=f"{first.schedule.case.layers.name(layer)}: {count} of {a.numel()} values differ",
                    hint="probably atomics, a split count that varies, or a counter that the first run left dirty",
                )
            ]
    return []


def batch_invariant(together: Observation, few: Observation) -> list[Finding]:
    """Check that the requests of ``few``, a part of ``together`` (``Step.part_of``), give the same bits as there.

    At most one finding, for the first request that does not.
    """
    assert few.step.part_of is not None
    starts = np.cumsum([0, *(request.new for request in together.step.requests)])
    row = 0
    for index, request in zip(few.step.part_of[1], few.step.requests, strict=True):
        rows, own = slice(starts[index], starts[index] + request.new), slice(row, row + request.new)
        row += request.new
        for layer, (a, b) in enumerate(zip(together.attention, few.attention, strict=True)):
            count = _differs(a[rows], b[own])
            if count:
                company = "by itself" if few.step.bs == 1 else f"in a batch of {few.step.bs}"
                return [
                    Finding(
                        "batch-invariant",
                        f"request {index} gives other bits {company} than in a batch of {together.step.bs}",
                        where=f"{few.schedule.case.layers.name(layer)}: {count} of {a[rows].numel()} values differ",
                        hint="probably a kernel, tile size or split count that depends on the rest of the batch",
                    )
                ]
    return []


CHECKS = (
    Check(
        "repeatable",
        "If declared: the same batch gives the same bits each time.",
        "Atomic adds, a split count that depends on timing, a counter that is not reset.",
        "flash-attention 1a58058a; sglang #26412",
        "The same step ran twice on one instance: look for dirty counters, atomics, memory that is not cleared.",
        evaluated_from=Stage.COMPLETED,
        applies=lambda declared, execution: declared.deterministic and execution is Execution.EAGER,
    ),
    Check(
        "batch-invariant",
        "If declared: a request gives the same bits whatever else is in the batch.",
        "A split count or tile size that depends on the batch.",
        "flash-attention #2450; aiter #4378; pegainfer #623",
        "Every request ran again, one by itself and the others in twos, fours and eights: look for kernels, sizes and"
        " splits that depend on the batch.",
        evaluated_from=Stage.COMPLETED,
        applies=lambda declared, execution: declared.batch_invariant and execution is Execution.EAGER,
        shown_by=lambda case: case.bs > 1,
    ),
)
"""Checks in the order in which they are worth reading. Their failures are found by comparing two runs."""
