"""Places of a step's keys in the pools of ranks (decode context parallelism).

A schedule numbers slots once, as for a single rank, and the judge knows only that numbering. Each rank has a pool with
the pages of the schedule in an order of its own, as a KV group has. The i-th key of a request on a rank is in the
rank's slot for the schedule's slot of key i: page by page, as an allocator of the rank would place it. Slots of a rank
that hold no key of a live request are unowned and poisoned, such as all of a request's slots past its keys there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from ..cases.features.kv_splits import splits_of
from ..contract import KVSplit
from .kv_groups import slot_map
from .schedule import Ints, Schedule, Step


@dataclass(frozen=True)
class RankPlaces:
    """Places of the keys of a step's requests. Arrays are indexed by slots of the schedule."""

    ranks: int
    """R."""
    rank: Ints = field(repr=False)
    """[slots] int64: rank that has the key of the slot; -1 if no live request owns the slot."""
    slot: Ints = field(repr=False)
    """[slots] int64: slot in the pool of that rank; -1 if no live request owns the slot."""

    def on(self, rank: int, elsewhere: int) -> Ints:
        """[slots] int64: slot in the pool of ``rank``, and ``elsewhere`` for keys that it does not have."""
        return np.where(self.rank == rank, self.slot, elsewhere)

    def owners(self, rank: int) -> Ints:
        """[slots] int64: slot of the schedule of each slot in the pool of ``rank``; -1 for an unowned one."""
        found = np.full(len(self.slot), -1, np.int64)
        mine = np.flatnonzero(self.rank == rank)
        found[self.slot[mine]] = mine
        return found


@lru_cache(maxsize=64)
def places_on_ranks(schedule: Schedule, step: Step) -> RankPlaces:
    """Places of the keys of a step's requests, those of the step included."""
    case = schedule.case
    # All modes of an instance have the same ranks.
    split = splits_of(case.instance_of or case)[0]
    size = (schedule.num_pages + 1) * case.page_size
    maps = np.stack([slot_map(schedule, rank) for rank in range(split.ranks)])
    rank, slot = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    for request in step.requests:
        slots = request.slots
        key = np.arange(len(slots))
        rank[slots] = owner = key // split.interleave % split.ranks
        slot[slots] = maps[owner, slots[local_index(split, key)]]
    return RankPlaces(split.ranks, rank, slot)


def local_index(split: KVSplit, key: Ints) -> Ints:
    """[n] int64: ``KVSplit.index`` of keys [n], on the host."""
    found: Ints = split.index(torch.from_numpy(key)).numpy()
    return found


def slots_on_ranks(schedule: Schedule, step: Step, slots: Ints) -> Ints:
    """[R, n] int64: slots [n] of the schedule in the pool of each rank; -1 for tokens of other ranks."""
    places = places_on_ranks(schedule, step)
    return np.stack([places.on(rank, -1)[slots] for rank in range(places.ranks)])
