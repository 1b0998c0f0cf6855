"""Bidirectional spans of a batch, as vLLM gives them: a list on the host, and a tensor on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.spans import Span

from ..harness import ServerHarness, StagedStep
from ..step_tensor import BatchField, Filling, GraphBatch, StepTensor

_EVERYTHING = (0, 1_000_003)
"""Span of all positions, which no request has."""


def spans_of(staged: StagedStep, padded: int = 0) -> list[list[Span]]:
    """Bidirectional spans of each live request of a step, and empty lists for its padded requests."""
    return [list(request.spans) for request in staged.step.requests] + [[] for _ in range(padded)]


def _given(harness: ServerHarness) -> bool:
    return harness.context.max_spans > 0


def _padded(ranges: list[list[Span]], most: int) -> list[list[Span]]:
    return [[*each, *[(0, 0)] * (most - len(each))] for each in ranges]


def _eager(harness: ServerHarness, staged: StagedStep) -> torch.Tensor | None:
    """[bs, R, 2] of the largest number of spans in the batch; None if no request has any."""
    ranges = spans_of(staged)
    most = max(map(len, ranges), default=0)
    return torch.tensor(_padded(ranges, most), dtype=torch.int32) if most else None


def _live(filling: Filling) -> npt.NDArray[np.int64]:
    return np.array(_padded(spans_of(filling.staged), filling.harness.context.max_spans), np.int64).reshape(-1, 2)


def _of_graph(batch: GraphBatch) -> torch.Tensor:
    """[bs, R, 2] of the largest number of spans that the instance meets."""
    most = batch.harness.context.max_spans
    return batch.buffers.rows("mm_prefix_range_tensor", most)[: batch.bs]


def _listed_in_graph(batch: GraphBatch) -> list[list[Span]]:
    if batch.staged is None:
        return [[] for _ in range(batch.bs)]
    return spans_of(batch.staged, batch.bs - batch.staged.step.bs)


TENSORS = (
    StepTensor(
        "mm_prefix_range_tensor",
        torch.int32,
        entries=lambda context, case: context.max_spans,
        columns=(2,),
        behind=_EVERYTHING,
        live=_live,
        rest=lambda filling: 0,
        eager=_eager,
        graph=_of_graph,
        given=_given,
        watched=("batch.mm_prefix_range_tensor",),
    ),
    BatchField("mm_prefix_range", eager=lambda harness, staged: spans_of(staged), graph=_listed_in_graph, given=_given),
)
