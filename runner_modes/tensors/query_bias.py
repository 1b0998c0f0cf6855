"""The bias among rows as a server gives it: a view of a wider buffer, filled in place between replays."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.case import Case
from attn_testkit.contract import BackendContext
from attn_testkit.steps.data import StepData
from attn_testkit.steps.query_bias import BEHIND_ROWS, COLUMNS_BETWEEN, bias_width
from attn_testkit.steps.schedule import Schedule

from ..harness import ServerHarness
from ..step_tensor import Filling, GraphBatch, StepTensor


def bias_stride(context: BackendContext, case: Case) -> int:
    """Columns of the buffer; 0 if batches have no bias."""
    return 0 if context.qq_bias == "none" else bias_width(case, context.max_extend_tokens) + COLUMNS_BETWEEN


def of_buffer(buffer: torch.Tensor) -> torch.Tensor:
    """``ForwardBatch.qq_bias`` [rows, W], a view of ``buffer`` [rows, stride]."""
    return buffer[:, :-COLUMNS_BETWEEN]


def bias_of_rows(context: BackendContext, case: Case, buffer: torch.Tensor, rows: int) -> torch.Tensor | None:
    """``ForwardBatch.qq_bias`` [rows, W], a view of the flat ``buffer``; None if batches have no bias."""
    stride = bias_stride(context, case)
    return of_buffer(buffer.view(-1, stride)[:rows]) if stride else None


def clear_bias(buffer: npt.NDArray[np.float32]) -> None:
    """Fill ``buffer`` [rows, stride] as for a capture: zeros, and NaN after the columns of the bias."""
    buffer[:] = 0
    buffer[:, -COLUMNS_BETWEEN:] = math.nan


def fill_bias(buffer: npt.NDArray[np.float32], data: StepData) -> None:
    """Write a step's bias into ``buffer`` [rows, stride]. Padded rows keep the values of an earlier step."""
    if data.qq_bias is not None:
        rows, columns = data.qq_bias.shape[1:]
        buffer[:rows, :-COLUMNS_BETWEEN] = BEHIND_ROWS
        buffer[:rows, :columns] = data.qq_bias[0].numpy()


def padded_bias(context: BackendContext, case: Case, data: StepData) -> torch.Tensor | None:
    """[T, stride] float32, host: the buffer of an eager step; None if batches have no bias."""
    stride = bias_stride(context, case)
    if not stride:
        return None
    buffer = np.empty((len(data.positions), stride), np.float32)
    clear_bias(buffer)
    fill_bias(buffer, data)
    return torch.from_numpy(buffer)


def _cleared(harness: ServerHarness, schedule: Schedule, fill: int) -> npt.NDArray[np.float32]:
    stride = bias_stride(harness.context, schedule.case)
    buffer = np.empty((schedule.max_bs * schedule.case.width, stride), np.float32)
    if stride:
        clear_bias(buffer)
    return buffer.reshape(-1)


def _live(filling: Filling) -> npt.NDArray[np.float32] | None:
    """Rows of the step; padded rows keep the values of an earlier step."""
    bias = padded_bias(filling.harness.context, filling.case, filling.data)
    return None if bias is None or filling.data.qq_bias is None else bias.numpy().reshape(-1)


def _of_graph(batch: GraphBatch) -> torch.Tensor | None:
    return bias_of_rows(batch.harness.context, batch.buffers.schedule.case, batch.buffers["qq_bias"], batch.rows)


TENSORS = (
    StepTensor(
        "qq_bias",
        torch.float32,
        per="row",
        entries=bias_stride,
        padded=_cleared,
        live=_live,
        eager=lambda harness, staged: padded_bias(harness.context, staged.schedule.case, staged.data),
        graph=_of_graph,
        given=lambda harness: harness.context.qq_bias != "none",
        watched=("batch.qq_bias",),
        view=of_buffer,
    ),
)
