"""Windows of encoder-only layers in a batch: where each begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.encoder_windows import windows_in
from attn_testkit.steps.schedule import Schedule

from ..harness import ServerHarness, StagedStep
from ..step_tensor import StepTensor


def _given(harness: ServerHarness) -> bool:
    return any(layer.encoder_window for layer in harness.context.layers)


def _starts(staged: StagedStep) -> npt.NDArray[np.int32]:
    rows = [count for request in staged.step.requests for count in windows_in(request.new)]
    return np.cumsum([0, *rows], dtype=np.int32)


def _captured(harness: ServerHarness, schedule: Schedule, fill: int) -> Any:
    return np.arange(schedule.max_bs * schedule.case.width + 1) if _given(harness) else 0


TENSORS = (
    StepTensor(
        "cu_window_seqlens",
        torch.int32,
        per="row",
        entries=lambda context, case: int(any(layer.encoder_window for layer in context.layers)),
        more=1,
        padded=_captured,
        live=lambda filling: _starts(filling.staged) if _given(filling.harness) else None,
        rest=lambda filling: _starts(filling.staged)[-1] if _given(filling.harness) else None,
        eager=lambda harness, staged: torch.from_numpy(_starts(staged)),
        graph=lambda batch: batch.buffers["cu_window_seqlens"][: batch.rows + 1],
        given=_given,
        watched=("batch.cu_window_seqlens",),
    ),
)
