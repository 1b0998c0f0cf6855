"""The KV pool of sparse attention. Keys that no row of a layer selects hold NaN in that layer, though a live request
owns them: a kernel that reads them and masks them later is found."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ...cases.data import StepData, pool_image, stored_kv
from ...cases.schedule import Schedule, Step
from ..family import Memory
from ..softmax.memory import KV_POOL

__all__ = ["SPARSE_POOL"]


def _not_selected(schedule: Schedule, step: Step, data: StepData) -> npt.NDArray[np.bool_]:
    """[L, slots] bool: slots of keys before the step that belong to a live request and that no row selects."""
    assert data.allowed is not None
    slots = (schedule.num_pages + 1) * schedule.case.page_size
    found = np.zeros((len(data.allowed), slots), np.bool_)
    for request in step.requests:
        found[:, request.slots[: request.prefix]] = True
    for place, request in enumerate(step.requests):
        # Slots may be shared by requests, and a branch may have a copy of a page.
        read = data.allowed[:, place].any(1)[:, : request.prefix].numpy()
        for layer, keys in enumerate(read):
            found[layer, request.slots[: request.prefix][keys]] = False
        found[:, request.copies.reshape(-1)] = False
    return found


def _held(schedule: Schedule, step: Step, data: StepData, *, after: bool) -> tuple[
    npt.NDArray[np.int64], npt.NDArray[np.uint8]
]:  # fmt: skip
    slots, rows = stored_kv(schedule, step, data, after=after)
    lost = _not_selected(schedule, step, data)[:, slots]
    nan = torch.full((1,), math.nan).to(data.stored_keys.dtype).view(torch.uint8).numpy()
    for layer, of_layer in enumerate(lost):
        rows[layer, :, of_layer] = np.tile(nan, rows.shape[-1] // len(nan))
    return slots, rows


def _image(
    schedule: Schedule,
    step: Step,
    data: StepData,
    finite_tails: bool,
    *,
    after: bool,
    unowned: float = math.nan,
    marked: str = "",
) -> torch.Tensor:
    image = pool_image(schedule, step, data, finite_tails, after=after, unowned=unowned, marked=marked).clone()
    lost = torch.from_numpy(_not_selected(schedule, step, data))
    for layer, of_layer in enumerate(lost):
        image[layer, :, of_layer] = torch.full((), math.nan).to(image.dtype)
    return image


SPARSE_POOL = Memory(watch=KV_POOL.watch, held=_held, image=_image, stored=KV_POOL.stored)
