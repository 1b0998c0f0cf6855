"""The watch of the KV pool: of one pool, of one pool per KV group, or of the few slots used in a very large pool."""

from __future__ import annotations

from ...cases.schedule import Schedule
from ...cases.ways import way_of
from ...contract import BackendContext
from ...watches.group_watch import GroupWatch
from ...watches.pool_watch import PoolWatch
from ...watches.spread_watch import SpreadWatch
from ..family import Watch

__all__ = ["watch_of"]


def watch_of(context: BackendContext, schedule: Schedule) -> Watch:
    """The watch of an instance whose first schedule is ``schedule``."""
    case = schedule.case
    if way_of(case).pool_elements:
        return SpreadWatch(context.kv_pool, schedule)
    if context.kv_groups:
        return GroupWatch(context.kv_groups, context.device, case.head_maps)
    return PoolWatch(context.kv_pool, case.head_maps)
