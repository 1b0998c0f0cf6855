"""The KV pool as memory: its contents and its watch, for one pool, one per KV group, or a few slots of a large pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...cases.features.kv_splits import has_own_pools
from ...cases.features.server.table import variant_of
from ...contract import BackendContext
from ...steps.data import StepData, new_kv, pool_image, stored_kv
from ...steps.schedule import Schedule, Step
from ...watches.group_watch import GroupWatch
from ...watches.pool_watch import PoolWatch
from ...watches.rank_watch import RankWatch
from ...watches.replica_watch import ReplicaWatch
from ...watches.spread_watch import SpreadWatch
from ..family import Memory, Noted, Stored, Watch


def _watch(context: BackendContext, schedule: Schedule) -> Watch:
    """The watch of an instance whose first schedule is ``schedule``."""
    case = schedule.case
    if variant_of(case).pool_elements:
        return SpreadWatch(context.kv_pool, schedule)
    if has_own_pools(case):
        return RankWatch(context.kv_groups)
    if case.row_ranks:
        return ReplicaWatch(context.kv_groups)
    if context.kv_groups:
        return GroupWatch(context.kv_groups, context.device, case.head_maps)
    return PoolWatch(context.kv_pool, case.head_maps)


def _held(
    schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = math.nan
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Stored keys and values of live requests, all of which may be read."""
    return stored_kv(schedule, step, data, after=after, unowned=unowned)


def _due(data: StepData) -> npt.NDArray[np.int64]:
    """Slots of the new rows, and of encoder keys that the step stores."""
    slots: npt.NDArray[np.int64] = data.out_cache_loc.numpy()
    slots = slots if data.stores else slots[:0]
    return slots if data.encoder is None else np.concatenate([slots, data.encoder.slots.numpy()])


def _stored(data: StepData) -> Stored:
    """K and V of the new rows: copies, compared bit for bit."""
    return Stored(*new_kv(data))


def _of_ranks(watch: Watch, found: Sequence[npt.NDArray[np.uint8]]) -> Mapping[str, Noted]:
    """Writes to slots of a rank that belong to none of its keys, or rows that ranks with all keys hold differently."""
    if isinstance(watch, ReplicaWatch):
        at, rows, shape = watch.different()
        if not len(at):
            return {}
        return {
            "different": (torch.int64, at.shape, at.reshape(-1).view(np.uint8)),
            "rows of different": (watch.bits, shape, rows),
        }
    if not isinstance(watch, RankWatch):
        return {}
    at, rows, shape = watch.strays()
    return {
        "strays": (torch.int64, at.shape, at.reshape(-1).view(np.uint8)),
        "rows of strays": (watch.bits, shape, rows),
    }


KV_POOL = Memory(watch=_watch, held=_held, image=pool_image, stored=_stored, due=_due, noted=_of_ranks)
