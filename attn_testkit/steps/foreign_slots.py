"""Places in the KV pool that a request must not read from, to measure the weight that it gives to each.

The pattern ``place.R.NAME`` gives all keys equal weight and a value of zero, except for the keys of one place, whose
value is one in every channel: each output of request R is then the weight of that place.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from .schedule import Request, Step

PLACES: Mapping[str, str] = {
    "tail": "slots after its last key, in its last page",
    "others": "keys of other requests",
    "page0": "page 0",
    "unowned": "unowned pages",
}
"""Name -> words for a report."""

Slots = npt.NDArray[np.int64]


def place_pattern(request: int, name: str) -> str:
    """The data pattern that asks about a place."""
    return f"place.{request}.{name}"


def _read(pattern: str) -> tuple[int, str]:
    _, request, name = pattern.split(".")
    return int(request), name


def values_of_place(v: torch.Tensor, pattern: str) -> torch.Tensor:
    """[L, B, S, Hk, Dv]: zeros, and ones in every other request if the pattern asks about those."""
    request, name = _read(pattern)
    v = torch.zeros_like(v)
    if name == "others":
        v[:] = 1.0
        v[:, request] = 0.0
    return v


def tail_slots(request: Request, page: int) -> Slots:
    """Slots of its pages that hold no key: in the last page after the last key, in draft-decode after each branch."""
    if request.columns is not None:
        region = request.columns[request.prefix - request.prefix % page :]
        pages = (np.unique(region // page)[:, None] * page + np.arange(page)).reshape(-1)
        return np.setdiff1d(pages, [*request.slots[: request.prefix], *request.copies.reshape(-1)])
    used, last = len(request.slots), int(request.slots[-1])
    return np.arange(last + 1, last + 1 + (-used) % page)


def marked_slots(step: Step, pattern: str, page: int, num_slots: int) -> torch.Tensor:
    """[n] int64: slots without a live key that belong to the place."""
    index, name = _read(pattern)
    tails = [tail_slots(r, page) for r in step.requests]
    if name == "tail":
        found = tails[index]
    elif name == "others":
        found = np.concatenate([np.empty(0, np.int64), *tails[:index], *tails[index + 1 :]])
    elif name == "page0":
        found = np.arange(page)
    else:
        taken = np.concatenate([np.arange(page), *tails, *(r.slots for r in step.requests)])
        found = np.setdiff1d(np.arange(num_slots), taken)
    return torch.from_numpy(found.astype(np.int64))
