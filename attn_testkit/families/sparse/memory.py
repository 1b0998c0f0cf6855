"""The KV pool of sparse attention: keys that a live request owns and no row selects.

In the first step of a schedule they hold ordinary values: a backend that attends to the wrong keys then gives values
from which ``SPARSE.supposed`` finds the mistake. In all other steps they hold NaN, which finds a kernel that reads them
and masks them later.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from ...steps.data import StepData, bytes_if_fp8, nan_of, pool_image, stored_kv
from ...steps.schedule import Schedule, Step
from ..family import Memory
from ..softmax.memory import KV_POOL


def _not_selected(schedule: Schedule, step: Step, data: StepData) -> npt.NDArray[np.bool_]:
    """[L, slots] bool: slots that must hold NaN, because no row selects their keys, which were stored before the
    step."""
    if data.allowed is None:
        # The backend selects, so all keys may be attended.
        return np.zeros((schedule.case.layers.count, (schedule.num_pages + 1) * schedule.case.page_size), np.bool_)
    slots = (schedule.num_pages + 1) * schedule.case.page_size
    found = np.zeros((len(data.allowed), slots), np.bool_)
    if (step.part_of[0] if step.part_of else step).index == 0:
        return found
    for request in step.requests:
        found[:, request.slots[: request.prefix]] = True
    for place, request in enumerate(step.requests):
        # Slots may be shared by requests, and a branch may have a copy of a page.
        read = data.allowed[:, place, ..., : request.prefix].flatten(1, -2).any(1).numpy()
        for layer, keys in enumerate(read):
            found[layer, request.slots[: request.prefix][keys]] = False
        found[:, request.copies.reshape(-1)] = False
    return found


def _held(
    schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = math.nan
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    slots, rows = stored_kv(schedule, step, data, after=after)
    if math.isnan(unowned):
        nan = nan_of(data.stored_keys.dtype).view(1).view(torch.uint8).numpy()
        for layer, lost in enumerate(_not_selected(schedule, step, data)[:, slots]):
            rows[layer, :, lost] = np.tile(nan, rows.shape[-1] // len(nan))
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
    image = pool_image(schedule, step, data, finite_tails, after=after, unowned=unowned, marked=marked)
    if not math.isnan(unowned):
        return image
    image = image.clone()
    for layer, lost in enumerate(torch.from_numpy(_not_selected(schedule, step, data))):
        bytes_if_fp8(image)[layer, :, lost] = bytes_if_fp8(nan_of(image.dtype))
    return image


SPARSE_POOL = Memory(watch=KV_POOL.watch, held=_held, image=_image, stored=KV_POOL.stored)
