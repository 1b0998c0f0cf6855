"""The numbers of a step of sparse attention: those of softmax attention, and the selected keys of each layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ...cases.data import StepData, make_step_data
from ...cases.schedule import Schedule, Step
from .selections import selected_keys

__all__ = ["attended_by", "make_sparse_data"]


def make_sparse_data(schedule: Schedule, step: Step, pattern: str | None = None) -> StepData:
    """Draw a step's numbers, as ``make_step_data`` does, with ``allowed`` and ``selected``."""
    data, keys = make_step_data(schedule, step, pattern), selected_keys(schedule, step)
    return replace(data, allowed=attended_by(data, keys), selected=_indices(schedule, step, data, keys))


def attended_by(data: StepData, keys: torch.Tensor) -> torch.Tensor:
    """[L, B, Tmax, S] bool: the keys of each row. ``keys`` [L, T, topk] int64, places along S; -1: none."""
    allowed = torch.zeros(len(keys), *data.visible.shape, dtype=torch.bool)
    layer, row, column = (keys >= 0).nonzero(as_tuple=True)
    allowed[layer, data.row_request[row], data.row_offset[row], keys[layer, row, column]] = True
    return allowed


def _indices(schedule: Schedule, step: Step, data: StepData, keys: torch.Tensor) -> torch.Tensor:
    """[L, T, topk] int32: ``keys`` in the index space of the case."""
    selection = schedule.case.selection
    assert selection is not None
    longest = data.key_positions.shape[1]
    if selection.slots:
        table = np.zeros((max(step.bs, 1), max(longest, 1)), np.int64)
        for place, request in enumerate(step.requests):
            table[place, : len(request.slots)] = request.slots
        names = torch.from_numpy(table)
    else:
        names = data.key_positions
    if not keys.numel():
        return keys.to(torch.int32)
    found = names[data.row_request[None, :, None], keys.clamp(min=0)]
    return torch.where(keys < 0, -1, found).to(torch.int32)
