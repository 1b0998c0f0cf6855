"""The KV pools of ranks that each have all keys: every rank stores every new token, in its own slot there."""

from __future__ import annotations

import torch

from ..cases.features.row_ranks import row_splits_of
from ..results.finding import Finding
from ..steps.kv_groups import slot_map
from .comparison import BITS
from .observation import Observation
from .rank_writes import wrong_slots


def different_of(observed: Observation) -> torch.Tensor:
    """Rank and slot of the schedule of each row that differs from that of rank 0, [n, 2] int64. Empty without ranks
    that each have all keys."""
    return observed.copies.group("pool").get("different", torch.zeros(0, 2, dtype=torch.int64))


def writes_on_replicas(observed: Observation) -> list[Finding]:
    """Report what is wrong in the pools of ranks, after page 0 of each; empty if every slot is right."""
    wrong = _wrong_by_rank(observed)
    if not wrong:
        return []
    rank, slots = next(iter(wrong.items()))
    new = set(observed.inputs.new_slots.tolist()) if observed.inputs else set[int]()
    slot = next((each for each in slots if each in new), slots[0])
    token = _token(observed, slot)
    what = "a slot that no live request owns was written"
    if token:
        what = "a slot of this step's tokens does not hold their K and V" if slot in new else "an earlier token is gone"
    at = int(slot_map(observed.schedule, rank)[slot])
    counts = ", ".join(f"{len(found)} on rank {each}" for each, found in wrong.items())
    return [
        Finding(
            "writes-own-kv",
            f"KV memory is wrong after the step: on rank {rank} {what}",
            where=f"rank {rank}, slot {at} of its pool" + (f": {token}" if token else ""),
            spread=f"slots that are wrong: {counts}",
            hint=_why(observed, wrong, rank, slot) if slot in new else "",
            step=observed.label,
        )
    ]


def _wrong_by_rank(observed: Observation) -> dict[int, list[int]]:
    """Rank -> slots of the schedule that are wrong in its pool, ascending; without ranks that are right."""
    first = wrong_slots(observed)
    different: dict[int, set[int]] = {}
    for rank, slot in different_of(observed).tolist():
        different.setdefault(rank, set()).add(slot)
    # Two rows of a slot that differ are not both right; one that differs from a wrong row counts as right.
    ranks = range(len(row_splits_of(observed.schedule.case)))
    found = {rank: sorted(set(first) ^ different.get(rank, set())) for rank in ranks}
    return {rank: slots for rank, slots in found.items() if slots}


def _token(observed: Observation, slot: int) -> str:
    """The token of a slot in words; empty if no live request owns it."""
    for index, request in enumerate(observed.step.requests):
        found = (request.slots == slot).nonzero()[0]
        if len(found):
            return f"the token at position {int(found[0])} of request {index}"
    return ""


def _why(observed: Observation, wrong: dict[int, list[int]], rank: int, slot: int) -> str:
    """Text that says what a rank stored instead of the rows of all ranks; empty if nothing is known."""
    assert observed.inputs is not None
    new, own = set(observed.inputs.new_slots.tolist()), _own_slots(observed, rank)
    held, rows = _held(observed, rank, slot), observed.inputs.new_rows
    untouched = held is None or bool(held.view(rows.dtype).float().isnan().all())
    if untouched and set(wrong[rank]) == new - own:
        return (
            f"rank {rank} stored only the rows that it computes: each rank has all keys, so it stores k and v of the "
            "rows of all ranks (out_cache_loc has a slot for each)"
        )
    if held is None:
        return ""
    same = rows.contiguous().view(BITS[rows.dtype.itemsize]) == held.unsqueeze(2)
    found = observed.inputs.new_slots[same.movedim(2, 0).flatten(1).all(1)]
    if not len(found):
        return ""
    return (
        f"rank {rank} stored {_token(observed, int(found[0]))} there: k and v are in the order of requests and "
        "positions, and not in the order in which the ranks computed them"
    )


def _own_slots(observed: Observation, rank: int) -> set[int]:
    """Slots of the tokens whose rows a rank computes."""
    split, found = row_splits_of(observed.schedule.case)[rank], set[int]()
    for request in observed.step.requests:
        found.update(request.slots[request.prefix + split.rows(request.new).numpy()].tolist())
    return found


def _held(observed: Observation, rank: int, slot: int) -> torch.Tensor | None:
    """Bits of a row of a rank's pool, [L, 2 or 1, Hk, Dqk]; None if they were not reported."""
    slots, rows = observed.written
    if rank == 0:
        found = (slots == slot).nonzero()
        return rows[:, :, int(found[0])] if len(found) else None
    pairs = different_of(observed).tolist()
    if [rank, slot] not in pairs:
        return None
    reported = observed.copies.group("pool")["rows of different"]
    at = pairs.index([rank, slot])
    return reported[:, :, at] if at < reported.shape[2] else None
