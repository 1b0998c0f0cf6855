"""The check of KV memory in a hybrid model: its slots are compared separately from slots of states."""

from __future__ import annotations

import torch

from ..cases.case import Case
from ..results.finding import Finding
from ..steps.data import new_kv
from .comparison import BITS
from .describe import index_ranges
from .observation import Observation


def writes_own_keys(observed: Observation, case: Case) -> list[Finding]:
    """Check that only the KV slots of the batch, and page 0, changed, and that they hold the batch's keys and
    values."""
    of_keys = observed.of_family("softmax")
    if of_keys.inputs is None:
        return []
    slots, rows = of_keys.written
    behind_page_0 = slots >= case.page_size
    slots, rows = slots[behind_page_0], rows[:, :, behind_page_0]
    own, want = new_kv(of_keys.inputs.data)
    others = slots[~torch.isin(slots, own)].tolist()
    if others:
        return [
            _finding(
                observed, f"KV slot {index_ranges(others)} was written, although no new token of the batch belongs "
                          "there",
                f"slots of the new tokens: {index_ranges(own.tolist())}",
            )
        ]  # fmt: skip
    bits = BITS[want.dtype.itemsize]
    stored = torch.isin(own, slots)
    if bool(stored.all()) and torch.equal(rows.view(bits), want.contiguous().view(bits)):
        return []
    if not bool(stored.all()):
        missing = own[~stored].tolist()
        return [
            _finding(observed, "a new token was not stored", f"KV slots that did not change: {index_ranges(missing)}")
        ]
    layer, part, place = (int(i) for i in (rows.view(bits) != want.view(bits)).flatten(3).any(-1).nonzero()[0])
    return [
        _finding(
            observed, "a slot of this step's tokens does not hold their K and V",
            f"{case.layers.name(case.places('softmax')[layer])}, {'KV'[part]}, slot {int(own[place])}",
        )
    ]  # fmt: skip


def _finding(observed: Observation, what: str, where: str) -> Finding:
    return Finding("writes-own-kv", f"KV memory is wrong after the step: {what}", where=where, step=observed.label)
