"""Places of a schedule's slots in the pools of a backend: in each KV group, and in a pool that is mostly unused.

A schedule numbers slots once. The pool of each further group has the same pages in another order: the judge knows one
numbering, and a backend meets one for each group. In a large pool half of the pages lie at its far end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ..cases.features.server.table import variant_of
from ..cases.layers import PERIOD
from ..contract import INDEX_WIDTH
from .schedule import Ints, Schedule, Step


def group_of_place(schedule: Schedule, place: int) -> int:
    """The group of the layer that runs as number ``place``."""
    return place % PERIOD if schedule.case.layers.groups else 0


@lru_cache(maxsize=64)
def slot_map(schedule: Schedule, group: int) -> Ints:
    """[slots] int64: where each slot of the schedule lies in the pool of a group. Page 0 is page 0 in all of them."""
    page, pages = schedule.case.page_size, np.arange(1, schedule.num_pages + 1)
    pages = np.where(pages > schedule.num_pages // 2, pages + pages_in_pool(schedule) - schedule.num_pages, pages)
    if group:
        # All modes of an instance have the same pools.
        case = schedule.case.instance_of or schedule.case
        pages = np.random.default_rng(case.digest ^ group).permutation(pages)
    return (np.concatenate([[0], pages])[:, None] * page + np.arange(page)).reshape(-1)


def pages_in_pool(schedule: Schedule) -> int:
    """Pages behind page 0 that the pool has: those of the schedule, or as many as its way asks for.

    With an indexer the numbers of index keys are as many as those of K, too.
    """
    case, pages = schedule.case, schedule.num_pages
    _, heads, width = case.head_shape
    least = min(heads * width, INDEX_WIDTH) if case.indexer else heads * width
    return pages + -(-variant_of(case).pool_elements // (case.page_size * least))


def slots_of_schedule(schedule: Schedule, slots: torch.Tensor) -> torch.Tensor:
    """[...] int64: slots of the pool as the schedule numbers them. Negative ones stay; -2: no slot of the schedule."""
    if not variant_of(schedule.case).pool_elements:
        return slots
    places = torch.from_numpy(slot_map(schedule, 0))
    found = torch.searchsorted(places, slots).clamp(max=len(places) - 1)
    return torch.where(slots < 0, slots, torch.where(places[found] == slots, found, -2))


def slot_in_pool(schedule: Schedule, place: int, slot: int) -> int:
    """A slot of the schedule, as the pool of a layer has it."""
    return int(slot_map(schedule, group_of_place(schedule, place))[slot])


def table_of_group(schedule: Schedule, step: Step, window: int, crosses: bool = False) -> npt.NDArray[np.int32]:
    """[rows, max_context_len] of a group with this window: slots as the schedule numbers them.

    ``crosses``: of a group of cross-attention layers. That of the other layers has no encoder keys, which lie behind.

    Every second request owns a page that it has freed once more, as a pool gives pages back to the request that freed
    them (vLLM #30915).
    """
    table, page = step.req_to_token, schedule.case.page_size
    if schedule.case.encoder_len and not crosses:
        table = table.copy()
        for request in step.requests:
            own = request.slots
            table[request.pool_row, : len(own)] = [*own[request.encoder_len :], *own[: request.encoder_len]]
        return table
    if window < 0:
        return table
    table = table.copy()
    for request in step.requests[1::2]:
        first = _first_kept(request.prefix, window, page)
        whole = (request.prefix + request.new) // page * page
        if first and whole > first:
            table[request.pool_row, :page] = table[request.pool_row, whole - page : whole]
    return table


def _first_kept(prefix: int, window: int, page: int) -> int:
    """The place in the request's order at which the page of the first key begins that a row of the step may see."""
    return max(0, prefix - window) // page * page


def outgrown(schedule: Schedule, step: Step, windows: tuple[int, ...]) -> Iterator[tuple[slice, Ints]]:
    """Layers of a group, and the slots that it has freed: whole pages that no row of the step sees.

    ``windows``: of each layer. Slots as the schedule numbers them; pages that another request still sees are kept.
    """
    if not schedule.case.layers.groups:
        return
    page = schedule.case.page_size
    for group in range(PERIOD):
        window = windows[group]
        if window < 0:
            continue
        gone, kept = set[int](), set[int]()
        for request in step.requests:
            first = _first_kept(request.prefix, window, page)
            gone.update(request.slots[:first].tolist())
            kept.update(request.slots[first:].tolist())
        yield slice(group, None, PERIOD), np.array(sorted(gone - kept), dtype=np.int64)
