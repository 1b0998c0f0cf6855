"""Rows of each rank in prefill context parallelism: ``ForwardBatch.pcp_rows``.

The batch of the harness has the rows of all ranks, one rank after another; ``runner_modes/row_ranks.py`` gives each
rank its part.
"""

from __future__ import annotations

import torch

from attn_testkit.cases.features.row_ranks import row_splits_of
from attn_testkit.contract import RowSplit

from ..harness import ServerHarness, StagedStep
from ..step_tensor import BatchField


def rows_of(split: RowSplit, new: list[int]) -> list[int]:
    """Rows of a rank among those of all requests, which have ``new`` rows each; ascending."""
    found, first = list[int](), 0
    for count in new:
        found += (first + split.rows(count)).tolist()
        first += count
    return found


def _eager(harness: ServerHarness, staged: StagedStep) -> torch.Tensor:
    new = [request.new for request in staged.step.requests]
    every = [row for split in row_splits_of(harness.case) for row in rows_of(split, new)]
    return torch.tensor(every, dtype=torch.int64)


TENSORS: tuple[BatchField, ...] = (
    BatchField(
        "pcp_rows",
        eager=_eager,
        given=lambda harness: bool(harness.case.row_ranks),
        watched=("batch.pcp_rows",),
    ),
)
