"""The KV pools of ranks after a step: each new token is stored by exactly one rank, in its slot there, bit for bit."""

from __future__ import annotations

import torch

from ..cases.features.kv_splits import splits_of
from ..contract import KVSplit
from ..results.finding import Finding
from ..steps.kv_groups import slot_map
from ..steps.ranks import RankPlaces, places_on_ranks
from .comparison import BITS
from .observation import Observation


def writes_on_ranks(observed: Observation) -> list[Finding]:
    """Report what is wrong in the pools of ranks, after page 0 of each."""
    strays = strays_of(observed).tolist()
    if strays:
        return [_stray(observed, strays)]
    wrong = wrong_slots(observed)
    places = places_on_ranks(observed.schedule, observed.step)
    if not wrong:
        return [_between(observed)]
    slot = wrong[0]
    request, key, is_new = _token(observed, slot)
    what = "does not hold K and V of" if is_new else "was overwritten; it belongs to"
    return [
        Finding(
            "writes-own-kv",
            f"KV memory is wrong after the step: a slot of rank {places.rank[slot]} {what} its "
            f"{'new' if is_new else 'earlier'} token",
            where=_place(places, slot, f"token at position {key} of request {request}"),
            spread=f"slots that are wrong: {len(wrong)}, on ranks "
            f"{', '.join(map(str, sorted({int(places.rank[each]) for each in wrong})))}",
            hint=_never_stored(observed, places, wrong) if is_new else "",
            step=observed.label,
        )
    ]


def strays_of(observed: Observation) -> torch.Tensor:
    """Rank and slot of each slot of a rank's pool that changed and that none of its keys owns, [n, 2] int64. Empty
    without ranks that have their own pools."""
    return observed.copies.group("pool").get("strays", torch.zeros(0, 2, dtype=torch.int64))


def _stray_rows(observed: Observation) -> torch.Tensor:
    """Bits of the first of these slots, [L, 2 or 1, at most 16, Hk, Dqk]."""
    return observed.copies.group("pool")["rows of strays"]


def wrong_slots(observed: Observation) -> list[int]:
    """Slots of the schedule whose contents are wrong: those of new tokens first, each in ascending order."""
    assert observed.inputs is not None
    slots, rows = observed.written
    want = dict(zip(observed.inputs.new_slots.tolist(), observed.inputs.new_rows.unbind(2), strict=True))
    held = dict(zip(slots.tolist(), rows.unbind(2), strict=True))
    new = [slot for slot, row in want.items() if slot not in held or not torch.equal(_bits(held[slot]), _bits(row))]
    return [*new, *(slot for slot in held if slot not in want)]


def _bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(BITS[rows.dtype.itemsize])


def _token(observed: Observation, slot: int) -> tuple[int, int, bool]:
    """Request and position of the key in a slot of the schedule, and True if it is new."""
    for index, request in enumerate(observed.step.requests):
        found = (request.slots == slot).nonzero()[0]
        if len(found):
            return index, int(found[0]), int(found[0]) >= request.prefix
    raise ValueError(f"no live request owns slot {slot}")


def _place(places: RankPlaces, slot: int, token: str) -> str:
    return f"rank {places.rank[slot]}, slot {places.slot[slot]} of its pool: {token}"


def _never_stored(observed: Observation, places: RankPlaces, wrong: list[int]) -> str:
    """Name the ranks that stored nothing, if others stored their tokens."""
    assert observed.inputs is not None
    new = set(observed.inputs.new_slots.tolist())
    ranks = {int(places.rank[slot]) for slot in new}
    lacking = {int(places.rank[slot]) for slot in wrong if slot in new}
    if len(lacking) < len(ranks) and all(slot in wrong for slot in new if int(places.rank[slot]) in lacking):
        return (
            f"rank {', '.join(map(str, sorted(lacking)))} stored none of its new tokens: each rank stores the rows "
            "whose out_cache_loc is not -1"
        )
    return ""


def _stray(observed: Observation, strays: list[list[int]]) -> Finding:
    """Report a slot of a rank that was written, although no key of the rank belongs there."""
    places = places_on_ranks(observed.schedule, observed.step)
    for index, (rank, at) in enumerate(strays[: _stray_rows(observed).shape[2]]):
        slot = _held_token(observed, index)
        if slot is None:
            continue
        request, key, _ = _token(observed, slot)
        return Finding(
            "writes-own-kv",
            f"KV memory is wrong after the step: rank {rank} stored a new token in a slot that none of its keys owns",
            where=f"rank {rank}, slot {at} of its pool holds the token at position {key} of request {request}, which "
            f"belongs in slot {places.slot[slot]} of rank {places.rank[slot]}",
            spread=_counts(strays),
            hint=_why(observed, places, (rank, at), (request, key, slot)),
            step=observed.label,
        )
    rank, at = strays[0]
    return Finding(
        "writes-own-kv",
        f"KV memory is wrong after the step: rank {rank} wrote a slot that none of its keys owns",
        where=f"rank {rank}, slot {at} of its pool",
        spread=_counts(strays),
        step=observed.label,
    )


def _counts(strays: list[list[int]]) -> str:
    ranks = [rank for rank, _ in strays]
    return "unowned slots that were written: " + ", ".join(
        f"{ranks.count(rank)} on rank {rank}" for rank in dict.fromkeys(ranks)
    )


def _held_token(observed: Observation, index: int) -> int | None:
    """Slot of the schedule of the new token whose K and V a stray row holds; None if it holds no token's."""
    assert observed.inputs is not None
    row = _stray_rows(observed)[:, :, index]
    same = (_bits(observed.inputs.new_rows) == row.unsqueeze(2)).movedim(2, 0).flatten(1).all(1)
    found = observed.inputs.new_slots[same]
    return int(found[0]) if len(found) else None


def _why(observed: Observation, places: RankPlaces, stray: tuple[int, int], token: tuple[int, int, int]) -> str:
    """Text that names the index or slot that a rank used by mistake; empty if no known mistake explains the slot."""
    (rank, at), (request, key, slot) = stray, token
    schedule, owner, local = observed.schedule, int(places.rank[slot]), int(places.slot[slot])
    split = splits_of(schedule.case)[rank]
    slots = slot_map(schedule, rank)[observed.step.requests[request].slots]
    index = int(split.index(torch.tensor(key)))
    if owner != rank:
        if at == len(places.slot) - 1:
            return f"rank {rank} used the out_cache_loc of -1 as an index, which is the last slot: skip these rows"
        of_rank = f"the token belongs to rank {owner}"
        if at == local:
            return f"rank {rank} stored it in the slot of another rank: {of_rank}, whose slot it is"
        return f"{of_rank}, because token j belongs to rank j // {split.interleave} % {split.ranks}; {_MINUS_ONE}"
    for used, wrong in _OTHER_INDICES:
        other = wrong(key, split, schedule.case.page_size)
        if other != index and other < len(slots) and int(slots[other]) == at:
            return f"rank {rank} used {used.format(key=key)} as a local slot; the local one is {index}: {_LOCAL}"
    return ""


_MINUS_ONE = "its out_cache_loc is -1 on all others, which do not store it"
_LOCAL = "out_cache_loc has the slot that the request table of the rank has at the local index"
_OTHER_INDICES = (
    ("the global position {key}", lambda key, split, page: key),
    ("position {key} divided by the number of ranks, as for I = 1,", lambda key, split, page: key // split.ranks),
    ("position {key} dealt by pages", lambda key, split, page: _dealt(key, split, page)),
)  # fmt: skip
"""Indices among the keys of a request that a rank may use by mistake, in words and as (position, split, page size)."""


def _dealt(key: int, split: KVSplit, interleave: int) -> int:
    """Index of a key among those of its rank if ``interleave`` tokens at a time are dealt."""
    return key // (split.ranks * interleave) * interleave + key % interleave


def _between(observed: Observation) -> Finding:
    """Report memory between slots that changed, although every slot is right."""
    return Finding(
        "writes-own-kv",
        "KV memory is wrong after the step: memory between slots of a rank's pool was written",
        where=f"byte {observed.outside[0] if observed.outside else '?'} of the memory of a pool",
        step=observed.label,
    )
