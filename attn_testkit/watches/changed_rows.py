"""Slots that changed and their rows, for watches whose rows are bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from .packing import Bytes
from .uploads import upload


def changed_rows(
    due: npt.NDArray[np.int64], marks: Bytes, held: Bytes, layers: int, read: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> tuple[npt.NDArray[np.int64], Bytes]:  # fmt: skip
    """Slots that changed, [n] ascending, and their rows [L, n, bytes].

    ``marks`` [slots]: not 0 for a slot that changed. ``held``: rows of the slots ``due``, which a look at memory has
    copied already. If others changed, too, ``read`` copies the rows of slots on the device.
    """
    changed = np.flatnonzero(marks)
    if set(changed.tolist()) <= set(due.tolist()):
        every = held.reshape(layers, len(due), -1)
        return changed, every[:, [place for place, slot in enumerate(due.tolist()) if marks[slot]]]
    taken: Bytes = read(upload(torch.from_numpy(changed), device)).cpu().numpy()
    return changed, taken
