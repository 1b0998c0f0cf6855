"""Places of a schedule's slots in the pools of a backend: in each KV group, and in a pool that is mostly unused.

A schedule numbers slots once. The pool of each further group has the same pages in another order: the judge uses one
numbering, and a backend sees one per group. In a large pool half of the pages are at its far end.
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
    """[slots] int64: slot in the pool of a group for each slot of the schedule. Page 0 is page 0 in all groups."""
    page, pages = schedule.case.page_size, np.arange(1, schedule.num_pages + 1)
    pages = np.where(pages > schedule.num_pages // 2, pages + pages_in_pool(schedule) - schedule.num_pages, pages)
    if group:
        # All modes of an instance have the same pools.
        case = schedule.case.instance_of or schedule.case
        pages = np.random.default_rng(case.digest ^ group).permutation(pages)
    return (np.concatenate([[0], pages])[:, None] * page + np.arange(page)).reshape(-1)


def pages_in_pool(schedule: Schedule) -> int:
    """Number of pages of the pool after page 0: those of the schedule, or as many as a big pool needs. With an indexer
    there are at least as many elements of index keys.
    """
    case, pages = schedule.case, schedule.num_pages
    _, heads, width = case.head_shape
    least = min(heads * width, INDEX_WIDTH) if case.indexer else heads * width
    return pages + -(-variant_of(case).pool_elements // (case.page_size * least))


def slots_of_schedule(schedule: Schedule, slots: torch.Tensor) -> torch.Tensor:
    """[...] int64: slots of the pool as the schedule numbers them. Negative values are kept; -2: no slot of the
    schedule."""
    if not variant_of(schedule.case).pool_elements:
        return slots
    places = torch.from_numpy(slot_map(schedule, 0))
    found = torch.searchsorted(places, slots).clamp(max=len(places) - 1)
    return torch.where(slots < 0, slots, torch.where(places[found] == slots, found, -2))


def slot_in_pool(schedule: Schedule, place: int, slot: int) -> int:
    """A slot of the schedule, as the pool of a layer has it."""
    return int(slot_map(schedule, group_of_place(schedule, place))[slot])


def table_of_group(
    schedule: Schedule, step: Step, window: int, crosses: bool = False, freed: str = "listed"
) -> npt.NDArray[np.int32]:
    """[rows, max_context_len] of a group with this window: slots as the schedule numbers them, and -1.

    ``crosses``: of a group of cross-attention layers. In the table of other layers the encoder keys come last. Every
    second request owns a page again that it had freed, as a pool may return pages to the request that freed them (vLLM
    #30915). ``freed``: entries for keys in freed pages, as ``Dialect.freed_pages`` has it.
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
    if freed != "listed":
        for request in step.requests:
            gone = np.arange(first_kept(request.prefix, window, page))
            table[request.pool_row, : len(gone)] = -1 if freed == "minus_one" else gone % page
        return table
    for request in step.requests[1::2]:
        first = first_kept(request.prefix, window, page)
        whole = (request.prefix + request.new) // page * page
        if first and whole > first:
            table[request.pool_row, :page] = table[request.pool_row, whole - page : whole]
    return table


def first_kept(prefix: int, window: int, page: int) -> int:
    """Index of the first key in the first page from which a row of the step may see a key."""
    return max(0, prefix - window) // page * page


def outgrown(schedule: Schedule, step: Step, windows: tuple[int, ...]) -> Iterator[tuple[slice, Ints]]:
    """Layers of a group, and the slots that the group has freed: whole pages that no row of the step sees. ``windows``:
    the window of each layer. Slots are numbered as in the schedule; pages that another request still sees are kept.
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
            first = first_kept(request.prefix, window, page)
            gone.update(request.slots[:first].tolist())
            kept.update(request.slots[first:].tolist())
        yield slice(group, None, PERIOD), np.array(sorted(gone - kept), dtype=np.int64)
