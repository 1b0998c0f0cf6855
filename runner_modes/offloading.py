"""Requests whose memory leaves to the host and comes back to other slots, in part, before the step that continues them.

The right rows of a step are first in other pages. The backend copies them to the host; then these pages are overwritten
on the device, and the backend copies the rows into the slots of the step, in pieces of several requests in turn. Host
and device are compared bit for bit. After a mistake the kit puts the right rows in place, so that other checks see a
step that had the right memory. If the server does not wait for a reload, the rows come back once more, and the step is
planned and run at once. While it is in flight, its rows leave again, and a page comes back to slots that nobody owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from typing_extensions import override

from attn_testkit.checks.places import STAGES, Place
from attn_testkit.contract import (
    AttentionBackend,
    BackendContext,
    ForwardMode,
    HostMemory,
    HostPool,
    Moved,
    Offloads,
    Transfer,
)
from attn_testkit.environment import delay
from attn_testkit.steps.kv_groups import first_kept
from attn_testkit.steps.schedule import Ints, Request, Schedule, Step
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.pool_rows import BITS
from attn_testkit.watches.uploads import upload

from .errors import blame
from .moved_rows import (
    ALL_ONES,
    InGroups,
    Mover,
    Pool,
    Rows,
    Table,
    Wrong,
    found_in,
    nothing_like,
    pools_of,
    wrong_rows,
)

_SPARE_PAGES = 2
_MOST_PAGES = 8
"""Pages of a request that leave, the last ones: copies of thousands of pages take seconds in the emulation."""
_KEEPS_STATE = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
"""Modes in which the forward leaves the state of the step in the pool; in others the server commits it later."""


@dataclass
class _Slots:
    """Rows of one request in one pool, in order. Each list has an entry per row."""

    new: list[int] = field(default_factory=list)
    """Slots in which the step expects the rows."""
    old: list[int] = field(default_factory=list)
    """Slots from which the rows leave: the same ones if they stay on the device, too."""
    host: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def back(self) -> list[int]:
        """Numbers of the rows that come back."""
        return [number for number, (new, old) in enumerate(zip(self.new, self.old, strict=True)) if new != old]


@dataclass(frozen=True)
class _Page:
    """The rest of a page that is not full: slots of the device, and of the host."""

    slots: list[int]
    host: list[int]


@dataclass
class _Of:
    """All rows of a step in one pool."""

    requests: dict[int, _Slots] = field(default_factory=dict)
    rest: list[_Page] = field(default_factory=list)
    pages: list[tuple[Ints, Ints]] = field(default_factory=list)
    """Slots of whole pages in which the step expects rows, and those of the pages from which they leave."""
    free: list[int] = field(default_factory=list)
    """Slots that no request owns, and that rows may use for a while: whole pages."""
    at: _Places = field(init=False, repr=False)

    def all(self, name: str) -> list[int]:
        """The lists of all requests, one after another."""
        return [each for slots in self.requests.values() for each in getattr(slots, name)]

    def back(self, name: str) -> list[int]:
        """The entries of rows that come back."""
        return [getattr(slots, name)[number] for slots in self.requests.values() for number in slots.back]

    def tokens(self, *, back: bool) -> tuple[tuple[int, int], ...]:
        """Request and token of each row."""
        return tuple(
            (request, slots.tokens[number])
            for request, slots in self.requests.items()
            for number in (slots.back if back else range(len(slots.new)))
        )


@dataclass(frozen=True)
class _Places:
    """Slots of ``_Of`` as indices, [n] int64: on the device, and ``host`` and ``host_rest`` on the host."""

    new: torch.Tensor
    back_to: torch.Tensor
    back_from: torch.Tensor
    pages_to: torch.Tensor
    pages_from: torch.Tensor
    rest: torch.Tensor
    scratch: torch.Tensor
    """Slots whose contents do not matter once rows have come back."""
    free: torch.Tensor
    host: torch.Tensor
    host_rest: torch.Tensor


@dataclass
class _Flight:
    """Transfers that were asked for while a step was in flight."""

    events: list[torch.cuda.Event | None]
    left: list[_Of]
    back: list[_Of]
    host: torch.Tensor
    """All host memory before, as one."""


class Offloader(Mover):
    """The pools of an instance, and the host memory to which their rows leave."""

    def __init__(self, context: BackendContext, schedules: Sequence[Schedule], offloads: Offloads) -> None:
        """Allocate the host memory, in the layout of the first schedule's case."""
        self._context, self._by_layer = context, offloads.by_layer
        self._groups = tuple(group for group in context.groups if group.kv_pool.layers)
        states = None if context.state is None else context.state.pool
        self._own = pools_of(self._groups, context.index_pool, states, lambda here: here, lambda here, _: here)
        case, steps = schedules[0].case, [step for schedule in schedules for step in schedule.every_step]
        self._page = page = case.page_size
        # A step leaves once before it runs, and once while it is in flight.
        most = max(
            sum(-(-each.prefix // page) - (-(each.prefix + each.new) // page) for each in step.requests)
            for step in steps
        )
        self._pages, self._states = most + _SPARE_PAGES, 2 * max(step.bs for step in steps) + _SPARE_PAGES
        self.host = self._host(case.offload)
        self._host_pools = [_of_host(pool, own.tables) for pool, own in zip(self._hosts(), self._own, strict=True)]
        self._stream = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call, unused-ignore]
        self._before: list[list[torch.Tensor]] = []
        self._of: list[_Of] = []
        self._step: Step | None = None
        self._flight: _Flight | None = None
        self._state_slots: list[int] = []
        """Slot of the state of each row of the request table, on the host: nothing waits for the device in flight."""

    def _host(self, layout: str) -> HostMemory:
        """Host memory for the rows of all pools."""
        pages, page = self._pages, self._page
        keys = []
        for group in self._groups:
            rows = {}
            for layer in group.kv_pool.layers:
                if layer.kv_sharing_target_layer_id < 0:
                    views = (
                        *group.kv_pool.get_kv_pages(layer.layer_id)[: layer.head_layout.pool_rows],
                        *group.kv_pool.get_scale_pages(layer.layer_id),
                    )
                    rows[layer.layer_id] = [_row(view, 2) for view in views]
            keys.append(HostPool.of(rows, pages, page, layout))
        index, states = self._context.index_pool, self._context.state
        of_index = of_states = None
        if index is not None:
            each = {layer: (index.get_keys(layer), index.get_scales(layer)) for layer in index.layer_ids}
            of_index = HostPool.of(
                {layer: [_row(view, 2) for view in own] for layer, own in each.items()}, pages, page, layout
            )
        if states is not None:
            pool = states.pool
            each = {one.layer_id: (pool.conv(one.layer_id), pool.temporal(one.layer_id)) for one in pool.layers}
            rows = {layer: [_row(view, 1) for view in own] for layer, own in each.items()}
            of_states = HostPool.of(rows, self._states, 1, layout)
        return HostMemory(tuple(keys), of_index, of_states)

    def _hosts(self) -> list[HostPool]:
        found = (*self.host.keys, self.host.index_keys, self.host.states)
        return [each for each in found if each is not None]

    @override
    def move(self, backend: AttentionBackend, schedule: Schedule, step: Step, in_groups: InGroups) -> Wrong:
        self._step, self._flight = step, None
        if self._context.state is not None:
            self._state_slots = self._context.state.req_to_state.cpu().tolist()
        self._of = self._planned(schedule, step, in_groups)
        if not any(of.requests for of in self._of):
            return []
        rng = np.random.default_rng(step.seed ^ 0x0FF1)
        with past_modes():
            self._before = [pool.copies() for pool in self._own]
            self._fill_host()
        self._put_elsewhere()
        wrong = self._left(backend, step, rng) or self._came_back(backend, step, rng)
        with past_modes():
            for pool, copies in zip(self._own, self._before, strict=True) if wrong else ():
                for now, was in zip(pool.memory, copies, strict=True):
                    now.copy_(was)
        if wrong:
            self._step = None
        return wrong

    @override
    def begin(self, backend: AttentionBackend, step: Step) -> None:
        if not self._by_layer or step is not self._step or not self._of:
            return
        self._overwrite("back_to")
        delay(self._stream)
        with blame("reload", step.label):
            for transfer in self._pieces(np.random.default_rng(step.seed ^ 0x0FF2)):
                backend.reload(transfer)

    def _put_elsewhere(self) -> None:
        """Put the right rows into the pages from which they leave, and nothing into the others."""
        with past_modes():
            for own, of, before in zip(self._own, self._of, self._before, strict=True):
                for table in own.tables:
                    rows = table.every(before)[of.at.pages_to]
                    table.write(of.at.pages_to, nothing_like(rows))
                    table.write(of.at.pages_from, rows)
        self._touch()

    def _touch(self) -> None:
        """Let the emulation see that the current stream wrote: copies on other streams must be in order with it."""
        for pool in self._own:
            for memory in pool.memory:
                memory.bitwise_or_(0)

    def _overwrite(self, name: Literal["back_to", "back_from"]) -> None:
        """Put nothing into slots of the rows that come back."""
        with past_modes():
            for own, of in zip(self._own, self._of, strict=True):
                slots: torch.Tensor = getattr(of.at, name)
                for table in own.tables:
                    table.write(slots, nothing_like(table.read(slots)))
        self._touch()

    def _fill_host(self) -> None:
        """Put nothing into the host memory, and into the rest of pages that are not full what the device has there:
        whole pages may be copied."""
        for host, own, of, before in zip(self._host_pools, self._own, self._of, self._before, strict=True):
            host.memory[0].fill_(ALL_ONES)
            for ours, table in zip(own.tables, host.tables, strict=True):
                table.write(of.at.host_rest, ours.every(before)[of.at.rest].cpu())

    def _left(self, backend: AttentionBackend, step: Step, rng: np.random.Generator) -> Wrong:
        """Let all rows leave, overwrite their slots, and compare the host memory."""
        with past_modes():
            expected = [self._expected(index, of) for index, of in enumerate(self._of)]
        with blame("offload", step.label):
            events = [
                backend.offload(each) for each in self._transfers(self._of, "old", rng.permutation(step.bs).tolist())
            ]
            _wait_for(events)
            self._overwrite("back_from")
            _host_waits_for(events)
        with past_modes():
            return self._wrong_on_host(self._of, expected, "left")

    def _came_back(self, backend: AttentionBackend, step: Step, rng: np.random.Generator) -> Wrong:
        """Let pieces of all requests come back in turn, and compare all memory."""
        with past_modes():
            host = [each.copies() for each in self._host_pools]
        with blame("reload", step.label):
            events = [backend.reload(each) for each in self._pieces(rng)]
            if self._by_layer:
                torch.cuda.synchronize()
            else:
                _wait_for(events)
                _host_waits_for(events)
        with past_modes():
            wrong = list[Place]()
            for index, of in enumerate(self._of):
                rows = Rows(of.at.back_to, of.at.back_to, of.tokens(back=True), of.at.scratch)
                wrong += wrong_rows(
                    self._own[index], self._before[index], rows, self._held_in(index), STAGES.index("came back")
                )
            changed = any(pool.changed(was) for pool, was in zip(self._host_pools, host, strict=True))
        return [*[Place.of("the host's memory", stage=STAGES.index("came back"))] * changed, *wrong]

    @override
    def in_flight(self, backend: AttentionBackend, schedule: Schedule, step: Step, in_groups: InGroups) -> None:
        if step is not self._step or not self._of or schedule.case.mode is ForwardMode.DRAFT_DECODE:
            return
        left = self._planned(schedule, step, in_groups, leaves_after=True)
        back = self._one_page_elsewhere()
        with past_modes():
            host = torch.cat([each.memory[0] for each in self._host_pools])
        with blame("offload", f"{step.label}, in flight"):
            events = [backend.offload(each) for each in self._transfers(left, "new", range(step.bs))]
        with blame("reload", f"{step.label}, in flight"):
            events += [backend.reload(each) for each in self._transfers(back, "new", range(step.bs))]
        self._flight = _Flight(events, left, back, host)

    @override
    def settle(self) -> Wrong:
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        _host_waits_for(flight.events)
        with past_modes():
            expected, start = list[torch.Tensor](), 0
            for index, (host, of) in enumerate(zip(self._host_pools, flight.left, strict=True)):
                size = len(host.memory[0])
                memory = flight.host[start : start + size].clone()
                for ours, table in zip(self._own[index].tables, host.tables, strict=True):
                    _onto(table, memory).write(of.at.host, ours.read(of.at.new).cpu())
                expected.append(memory)
                start += size
            wrong = self._wrong_on_host(flight.left, expected, "left in flight")
            for index, of in enumerate(flight.back):
                wrong += self._wrong_elsewhere(index, of)
        return wrong

    def _wrong_elsewhere(self, index: int, of: _Of) -> Iterator[Place]:
        """Rows that came back to slots of nobody and are wrong. The slots become as before."""
        for table in self._own[index].tables:
            was = table.every(self._before[index])
            wrong = (table.read(of.at.new) != was[of.at.back_from]).any(1)
            table.write(of.at.free, was[of.at.free])
            for number in wrong.nonzero()[:1, 0].tolist():
                request, token = of.tokens(back=False)[number]
                count = int(wrong.sum())
                yield Place.of(
                    table.what, layer=table.layer_id, request=request, token=token, count=count,
                    stage=STAGES.index("came back in flight"),
                )  # fmt: skip

    def _wrong_on_host(self, all_of: Sequence[_Of], expected: Sequence[torch.Tensor], stage: str) -> Wrong:
        wrong = list[Place]()
        for index, (of, right) in enumerate(zip(all_of, expected, strict=True)):
            rows = Rows(of.at.host, of.at.host, of.tokens(back=False), of.at.host_rest)
            wrong += wrong_rows(self._host_pools[index], [right], rows, self._held_in(index), STAGES.index(stage))
        return wrong

    def _expected(self, index: int, of: _Of) -> torch.Tensor:
        """[bytes]: host memory once the right rows have left."""
        memory: torch.Tensor = self._host_pools[index].memory[0].clone()
        for ours, table in zip(self._own[index].tables, self._host_pools[index].tables, strict=True):
            _onto(table, memory).write(of.at.host, ours.every(self._before[index])[of.at.new].cpu())
        return memory

    def _held_in(self, index: int) -> _HeldIn:
        of, before = self._of[index], self._before[index]
        return _HeldIn(self._own[index].tables, before, dict(zip(of.all("new"), of.tokens(back=False), strict=True)))

    def _index(self, of: _Of, *, paged: bool) -> None:
        """Make the indices of the rows of a pool, before a block in which none can be uploaded."""
        rest = [slot for page in of.rest for slot in page.slots]
        pages = [[slot for pair in of.pages for slot in pair[side].tolist()] for side in (0, 1)]
        scratch = rest + of.free + list(range(self._page if paged else 1))
        on_device = (of.all("new"), of.back("new"), of.back("old"), *pages, rest, scratch, of.free)
        together = upload(_indices([slot for each in on_device for slot in each]), self._context.device)
        names = "new", "back_to", "back_from", "pages_to", "pages_from", "rest", "scratch", "free"
        split = together.tensor_split(np.cumsum([len(each) for each in on_device])[:-1].tolist())
        of.at = _Places(
            **dict(zip(names, split, strict=True)),
            host=_indices(of.all("host")),
            host_rest=_indices([slot for page in of.rest for slot in page.host]),
        )

    def _has_pages(self, index: int) -> bool:
        """True for pools of keys and of index keys."""
        return self._context.state is None or index < len(self._own) - 1

    def _transfers(self, all_of: Sequence[_Of], name: str, order: Sequence[int]) -> Iterator[Transfer]:
        """A transfer per request. ``name``: which slots of the device."""
        for request in order:
            of = [each.requests.get(int(request), _Slots()) for each in all_of]
            if any(each.new for each in of):
                yield self._transfer([_moved(getattr(each, name), each.host) for each in of])

    def _pieces(self, rng: np.random.Generator) -> Iterator[Transfer]:
        """Transfers of the rows that come back: two of each request that has several pages, in any order."""
        found = []
        for request in sorted({request for of in self._of for request in of.requests}):
            of = [each.requests.get(request, _Slots()) for each in self._of]
            halves = [self._halves(each, paged=self._has_pages(index)) for index, each in enumerate(of)]
            for side in (0, 1):
                rows = [half[side] for half in halves]
                if any(rows):
                    moved = [
                        _moved([each.new[n] for n in mine], [each.host[n] for n in mine])
                        for each, mine in zip(of, rows, strict=True)
                    ]
                    found.append(self._transfer(moved))
        yield from (found[number] for number in rng.permutation(len(found)))

    def _halves(self, of: _Slots, *, paged: bool) -> tuple[list[int], list[int]]:
        """Numbers of rows, in two parts of whole pages."""
        back = of.back
        cut = -(-len(back) // self._page) // 2 * self._page if paged else len(back)
        return back[:cut], back[cut:]

    def _transfer(self, moved: Sequence[Moved]) -> Transfer:
        state = moved[-1] if self._context.state is not None else None
        keys = tuple(moved[: len(self._groups)])
        return Transfer(self.host, keys, state if state is not None and len(state.slots) else None, self._stream)

    def _planned(self, schedule: Schedule, step: Step, in_groups: InGroups, *, leaves_after: bool = False) -> list[_Of]:
        """The rows of each pool. ``leaves_after``: those of the step, too, and none comes back."""
        rng, page = np.random.default_rng(step.seed ^ 0x0FF0 ^ leaves_after), self._page
        found = [_Of() for _ in self._own]
        # The two times use different pages of the host.
        host_pages = np.random.default_rng(step.seed).permutation(self._pages)[:: -1 if leaves_after else 1]
        for number, group in enumerate(self._groups):
            of, taken, owned, seen = found[number], 0, {0}, set[int]()
            window = self._context.layers[group.index].sliding_window_size if len(self._groups) > 1 else -1
            for at, each in enumerate(step.requests):
                mine = in_groups(schedule, each.slots)[group.index]
                owned.update((mine // page).tolist())
                end = each.prefix + each.new if leaves_after else each.prefix
                start = first_kept(each.prefix, window, page) if window >= 0 else 0
                start = max(start, (-(-end // page) - _MOST_PAGES) * page)
                # Of every second request a part stays on the device, too.
                kept = end if leaves_after else start + -(-(end - start) // page) // 2 * page * (at % 2)
                slots = of.requests.setdefault(at, _Slots())
                for first in range(start, end, page):
                    if int(mine[first]) // page in seen:
                        continue
                    seen.add(int(mine[first]) // page)
                    count, begin = min(page, end - first), int(host_pages[taken]) * page
                    taken += 1
                    own = mine[first : first + count].tolist()
                    slots.new += own
                    slots.old += own if first < kept else [-1] * count
                    slots.host += range(begin, begin + count)
                    slots.tokens += range(first, first + count)
                    after = own[-1] + 1
                    rest = list(range(after, -(-after // page) * page))
                    of.rest.append(_Page(rest, list(range(begin + count, begin + page))))
            free = [each for each in range(1, group.kv_pool.num_slots // page) if each not in owned]
            _choose_old(of, [int(each) for each in rng.permutation(free)], page)
        if self._context.index_pool is not None:
            found[len(self._groups)] = found[0]
        if self._context.state is not None and not (leaves_after and schedule.case.mode not in _KEEPS_STATE):
            self._plan_states(found[-1], step, rng, leaves_after=leaves_after)
        for index, one in enumerate(found):
            self._index(one, paged=self._has_pages(index))
        return found

    def _plan_states(self, of: _Of, step: Step, rng: np.random.Generator, *, leaves_after: bool) -> None:
        assert self._context.state is not None
        slots = self._state_slots
        host = np.random.default_rng(step.seed).permutation(self._states)[:: -1 if leaves_after else 1].tolist()
        begun = [(at, each) for at, each in enumerate(step.requests) if _has_state(each, leaves_after=leaves_after)]
        for (at, each), place in zip(begun, host, strict=False):
            own = slots[each.pool_row]
            end = each.prefix + each.new * leaves_after
            of.requests[at] = _Slots([own], [own if leaves_after else -1], [place], [end])
        owned = {0, *(slots[each.pool_row] for each in step.requests)}
        free = [each for each in range(self._context.state.pool.num_slots) if each not in owned]
        _choose_old(of, [int(each) for each in rng.permutation(free)], 1)

    def _one_page_elsewhere(self) -> list[_Of]:
        """One page of a request, which left before the step, for slots that nobody owns."""
        found = [_Of() for _ in self._own]
        for index, of in enumerate(self._of[: len(self._groups)]):
            for request, slots in of.requests.items():
                if not (of.free and slots.new):
                    continue
                first = [n for n, slot in enumerate(slots.new) if slot // self._page == slots.new[0] // self._page]
                place = of.free[: self._page]
                found[index].requests[request] = _Slots(
                    place[: len(first)], [slots.new[n] for n in first], [slots.host[n] for n in first],
                    [slots.tokens[n] for n in first],
                )  # fmt: skip
                found[index].free = place
                break
        if self._context.index_pool is not None:
            found[len(self._groups)] = found[0]
        for one in found:
            self._index(one, paged=True)
        return found


@dataclass(frozen=True)
class _HeldIn:
    """A search for numbers among the right rows of a pool."""

    tables: tuple[Table, ...]
    before: list[torch.Tensor]
    tokens: dict[int, tuple[int, int]]

    def __call__(self, like: Table, held: torch.Tensor) -> Place:
        sources = ((table, -1, self.tokens, table.every(self.before).cpu()) for table in self.tables)
        return found_in(sources, like, held.cpu())


def _row(view: torch.Tensor, counting: int) -> tuple[Sequence[int], torch.dtype]:
    """Shape and dtype of a row. ``counting``: dimensions that count slots."""
    return tuple(view.shape[counting:]), view.dtype


def _has_state(request: Request, *, leaves_after: bool) -> bool:
    return bool(request.prefix or (leaves_after and request.new))


def _choose_old(of: _Of, free: list[int], page: int) -> None:
    """Choose the pages from which rows leave: those of other rows, and some of nobody. ``free``: pages of nobody, in
    any order. Without another page a row leaves from its own and does not come back."""
    back = [
        slot // page
        for slots in of.requests.values()
        for slot, old in zip(slots.new, slots.old, strict=True)
        if old < 0
    ]
    pages = list(dict.fromkeys(back))
    cycle = [*pages, *free[: len(pages) // 2 + 1]] if pages else []
    old = {each: cycle[(number + 1) % len(cycle)] for number, each in enumerate(cycle)}
    for slots in of.requests.values():
        slots.old = [
            was if was >= 0 else old[new // page] * page + new % page
            for new, was in zip(slots.new, slots.old, strict=True)
        ]
    of.pages = [(each * page + np.arange(page), old[each] * page + np.arange(page)) for each in pages]
    of.free = [slot for each in free[: len(pages) // 2 + 1] for slot in range(each * page, (each + 1) * page)]


def _indices(slots: Sequence[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def _moved(slots: Sequence[int], host: Sequence[int]) -> Moved:
    return Moved(_indices(slots), _indices(host))


def _of_host(pool: HostPool, like: Sequence[Table]) -> Pool:
    """The tables of a host pool, in the order of those of its device pool."""
    tables, taken = [], dict[int, int]()
    for table in like:
        number = taken.get(table.layer_id, 0)
        taken[table.layer_id] = number + 1
        parts = [each for each in pool.parts[table.layer_id] if each.numel()]
        view = parts[number]
        bits = view.view(BITS[view.dtype.itemsize])
        tables.append(Table(table.what, table.layer_id, bits, tuple(view.shape[:2]), table.parts, 0))
    return Pool(tuple(tables), (pool.memory,))


def _onto(table: Table, memory: torch.Tensor) -> Table:
    """The table over a copy of its memory."""
    bits = memory.view(table.bits.dtype).as_strided(table.bits.shape, table.bits.stride(), table.bits.storage_offset())
    return Table(table.what, table.layer_id, bits, table.sizes, table.parts, 0)


def _wait_for(events: Sequence[torch.cuda.Event | None]) -> None:
    """Order the next work of the current stream after transfers, as servers do before they use slots again."""
    for event in events:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _host_waits_for(events: Sequence[torch.cuda.Event | None]) -> None:
    for event in events:
        if event is not None:
            event.synchronize()
    torch.cuda.current_stream().synchronize()
