"""The KV pool itself is wrong: what is computed from it follows."""

from __future__ import annotations

import torch

from ...cases.data import new_kv
from ...checks.describe import index_ranges
from ..attended_keys import AttendedKeys
from .evidence import Evidence

__all__ = ["stored_elsewhere"]


def stored_elsewhere(e: Evidence) -> str:
    """Every wrong request has KV tokens whose slots do not hold what they should."""
    spoilt, attended = _spoilt(e), e.attended
    if attended is not None and _not_read(attended):
        return ""  # what is missing was not read, whatever lies there
    if not e.wrong or any(not spoilt.get(request) for request in e.wrong):
        return ""
    request = e.wrong[0]
    tokens = spoilt[request]
    verb = "does" if len(tokens) == 1 else "do"
    return (
        f"KV token{'s' if len(tokens) > 1 else ''} {index_ranges(tokens)} of request {request} {verb} not lie in the "
        "pool as stored: read what writes-own-kv says first, for wrong numbers follow from that"
    )


def _not_read(attended: AttendedKeys) -> bool:
    """Whether KV tokens are missing without whom the weights sum to 1: of some that hold nothing the rest would not."""
    missing = attended.wanted - attended.used
    if not missing or attended.total is None or not attended.normalised:
        return False
    return 1 - attended.total < len(missing) / len(attended.wanted) / 2


def _spoilt(e: Evidence) -> dict[int, list[int]]:
    """Request -> its KV tokens that were not stored, were stored wrongly, or were overwritten."""
    pool = e.observed.copies.group("pool")
    if "slots" not in pool or e.step.stored:
        return {}
    slots, rows = pool["slots"], pool["rows"]
    due, want = new_kv(e.step, e.expected.data)
    held = {int(slot): rows[:, :, at] for at, slot in enumerate(slots)}
    new = {int(slot): want[:, :, at].view(rows.dtype) for at, slot in enumerate(due)}
    wrong = {slot for slot, row in new.items() if slot not in held or not torch.equal(held[slot], row)}
    wrong |= set(held) - set(new)
    return {
        index: [token for token, slot in enumerate(request.slots.tolist()) if slot in wrong]
        for index, request in enumerate(e.step.requests)
    }
