"""Requests that another instance hands over: the memory of its ranks, and what ``receive`` makes of it, bit for bit.

Extend compares the rows that a prefill leaves in a pool, bit for bit. So the kit fills the sender's pools itself: with
the rows that the receiver's pools should get, in the sender's pages, and with other rows for heads of other ranks. The
receiver's slots hold NaN until ``receive`` has run. After a mistake the kit puts the right rows there, so that other
checks see a step that had the right memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from attn_testkit.cases.features.handed import handed_of
from attn_testkit.checks.received import Place
from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    HandedRequest,
    HandOver,
    IndexPool,
    KVGroup,
    KVPool,
    Sender,
    StatePool,
    heads_of_rank,
)
from attn_testkit.contract.index_pool import keys_of, scales_of
from attn_testkit.contract.kv_layouts import between, place_of, slot_dims
from attn_testkit.steps.kv_groups import first_kept
from attn_testkit.steps.schedule import Ints, Schedule, Step
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.pool_rows import BITS
from attn_testkit.watches.uploads import upload, upload_into

_ALL_ONES = 0xFF
"""A byte of memory that holds nothing: NaN in every dtype of numbers."""
_SPARE_PAGES = 3
_InGroups = Callable[[Schedule, Ints], Ints]
Wrong = list[Place]


@dataclass(frozen=True)
class _Part:
    """Heads that follow each other in a row: of K, or the channels of q in a window."""

    heads: int
    total: int
    """Heads of the model, on all ranks together."""
    width: int
    """Numbers of a head."""


@dataclass(frozen=True)
class _Table:
    """Rows of one layer, by slot."""

    what: str
    """Kind of the rows, as ``Place.words`` has it."""
    layer_id: int
    bits: torch.Tensor = field(repr=False)
    """[*slots, *row] integers: a view of memory."""
    sizes: tuple[int, ...]
    """Sizes of the dimensions that count slots."""
    parts: tuple[_Part, ...]
    memory: int
    """Number of the block of memory, among those of the pool."""

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, numbers]: rows of slots [n] int64."""
        return self.bits[place_of(slots, self.sizes)].reshape(len(slots), -1)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows`` [n, numbers] in slots [n] int64."""
        where = place_of(slots, self.sizes)
        self.bits.index_put_(where, rows.reshape(len(slots), *self.bits.shape[len(self.sizes) :]))

    def every(self, memory: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """[slots, numbers]: all rows, or those of a copy of the pool's memory."""
        bits = self.bits
        if memory:
            flat = memory[self.memory].view(bits.dtype)
            bits = flat.as_strided(bits.shape, bits.stride(), bits.storage_offset())
        return bits.reshape(math.prod(self.sizes), -1)

    def heads(self, rows: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Number of the part, of the head in it, and its numbers [..., width] in rows [..., numbers]."""
        start = 0
        for number, part in enumerate(self.parts):
            for head in range(part.heads):
                yield number, head, rows[..., start : start + part.width]
                start += part.width


@dataclass(frozen=True)
class _Pool:
    """The tables of one pool, and all its memory."""

    tables: tuple[_Table, ...]
    memory: tuple[torch.Tensor, ...] = field(repr=False)
    """Each allocation, [bytes] uint8."""
    unused: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    """[bytes] bool of each allocation: True for bytes that belong to no table."""

    def copies(self) -> list[torch.Tensor]:
        """Copies of all memory."""
        return [memory.clone() for memory in self.memory]

    def changed(self, before: Sequence[torch.Tensor]) -> bool:
        """True if a byte differs."""
        return not all(torch.equal(now, was) for now, was in zip(self.memory, before, strict=True))


def _of_keys(pool: KVPool, total: Callable[[int], int]) -> _Pool:
    memory = tuple(whole.view(torch.uint8) for whole, _ in pool.pieces)
    starts = [whole.untyped_storage().data_ptr() for whole in memory]
    owners = [layer for layer in pool.layers if layer.kv_sharing_target_layer_id < 0]
    tables = []
    for layer in owners:
        found, here = pool.memory[layer.layer_id], layer.tp_k_head_num
        rows, scales = (zip(names, parts, strict=False) for names, parts in (
            (("K", "V"), found.parts), (("scales of K", "scales of V"), found.scales)
        ))  # fmt: skip
        views = [*rows, *scales]
        for what, view in views:
            sizes = tuple(view.shape[: slot_dims(view, pool.num_slots)])
            width = math.prod(view.shape[len(sizes) :]) // here
            bits = view.view(BITS[view.dtype.itemsize])
            at = starts.index(view.untyped_storage().data_ptr())
            tables.append(_Table(what, layer.layer_id, bits, sizes, (_Part(here, total(here), width),), at))
    unused = [between(whole, views) for whole, views in pool.pieces]
    wide = [each.repeat_interleave(pool.dtype.itemsize) for each in unused]
    return _Pool(tuple(tables), memory, tuple(wide))


def _of_index(pool: IndexPool) -> _Pool:
    tables = []
    for layer_id in pool.layer_ids:
        buffer = pool.get_index_buffer(layer_id)
        keys = keys_of(buffer).view(torch.uint8)
        scales = scales_of(buffer).view(torch.int32)
        for what, bits in (("index keys", keys), ("index scales", scales)):
            width = math.prod(bits.shape[2:])
            tables.append(_Table(what, layer_id, bits, tuple(bits.shape[:2]), (_Part(1, 1, width),), 0))
    return _Pool(tuple(tables), (pool.memory.view(-1),))


def _of_states(pool: StatePool, total: Callable[[int], int]) -> _Pool:
    tables, used = [], torch.zeros(pool.memory.numel(), dtype=torch.bool, device=pool.device)
    for layer in pool.layers:
        window, state = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
        parts = tuple(_Part(heads, total(heads), width * window.shape[2]) for heads, width in layer.channels)
        one = (_Part(layer.v_heads, total(layer.v_heads), layer.v_dim * layer.k_dim),)
        for what, view, of in (("window", window, parts), ("state", state, one)):
            if view.numel():
                bits = view.view(BITS[view.dtype.itemsize])
                tables.append(_Table(what, layer.layer_id, bits, (pool.num_slots,), of, 0))
                # A number has as many marks as bytes.
                size = view.dtype.itemsize
                marks = used.as_strided(
                    (*view.shape, size), (*(step * size for step in view.stride()), 1), view.storage_offset() * size
                )
                marks.fill_(True)
    return _Pool(tuple(tables), (pool.memory,), (~used,))


def _with_heads(layer: AttentionLayer, heads: int) -> AttentionLayer:
    """A layer of keys with as many KV heads, and as many query heads for each."""
    if layer.head_layout.values_in_keys:
        return layer
    return replace(layer, tp_k_head_num=heads, tp_q_head_num=layer.tp_q_head_num // layer.tp_k_head_num * heads)


@dataclass(frozen=True)
class _Rows:
    """Rows that one pool receives."""

    own: torch.Tensor
    """[n] int64: slots of the receiver."""
    sent: torch.Tensor
    """[n] int64: slots of the sender."""
    tokens: tuple[tuple[int, int], ...]
    """Request of the step, and its token, of each row; of a state the request's number of tokens."""
    free: torch.Tensor
    """Slots whose contents do not matter: the rest of a request's last page, and page 0."""


class Receiver:
    """The pools of an instance, and those of the ranks from which it receives requests."""

    def __init__(self, context: BackendContext, schedules: Sequence[Schedule]) -> None:
        """Allocate the memory of the sender, which the first schedule's case describes."""
        case, handed = schedules[0].case, handed_of(schedules[0].case)
        assert handed is not None
        self._context, self._handed = context, handed
        self._rank = case.derived("receiving-rank", handed.ranks)
        self._kv_heads = handed.total(case.heads.kv_heads)
        steps = [step for schedule in schedules for step in schedule.every_step]
        counts = (sum(-(-each.prefix // handed.page) for each in step.requests) for step in steps)
        self._pages, self._rows = max(counts) + _SPARE_PAGES, max(step.bs for step in steps) + 2
        self._groups = tuple(group for group in context.groups if group.kv_pool.layers)
        columns = max(each.prefix for step in steps for each in step.requests)
        shape = len(context.groups), self._rows + 1, max(columns, 1)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=context.device)
        self._senders = tuple(self._sender() for _ in range(handed.senders))
        states = None if context.state is None else context.state.pool
        self._own = self._pools(self._groups, context.index_pool, states, handed.ranks)
        self._sent = [self._pools(each.groups, each.index_pool, each.state, handed.senders) for each in self._senders]

    def _sender(self) -> Sender:
        context, handed, groups = self._context, self._handed, list[KVGroup]()
        for group in self._groups:
            pool = group.kv_pool
            heads = [len(heads_of_rank(0, handed.senders, handed.total(layer.tp_k_head_num))) for layer in pool.layers]
            other = KVPool(
                self._pages * handed.page, handed.page, tuple(map(_with_heads, pool.layers, heads)), pool.dtype,
                context.device, handed.layout, row_format=pool.row_format,
            )  # fmt: skip
            groups.append(KVGroup(group.index, group.layer_ids, other, self._tables[group.index]))
        index = context.index_pool
        if index is not None:
            slots = (self._pages + 1) * handed.page
            index = IndexPool(slots, index.layer_ids, index.scale, context.device)
        return Sender(tuple(groups), index, self._states())

    def _states(self) -> StatePool | None:
        if self._context.state is None:
            return None
        own, handed = self._context.state.pool, self._handed

        def there(heads: int) -> int:
            return heads * handed.ranks // handed.senders

        layers = tuple(
            replace(each, tp_k_head_num=there(each.k_heads), tp_q_head_num=there(each.v_heads)) for each in own.layers
        )
        return StatePool(
            self._rows + 1, layers, own.conv_dtype, own.dtype, own.device, own.order,
            strided=own.strided, more_columns=own.more_columns,
        )  # fmt: skip

    def _pools(
        self, groups: Sequence[KVGroup], index: IndexPool | None, states: StatePool | None, ranks: int
    ) -> list[_Pool]:
        """The pools of one of ``ranks`` ranks: those of groups, of index keys, of states."""
        heads = self._handed.heads
        found = [_of_keys(group.kv_pool, lambda here: heads or here * ranks) for group in groups]
        found += [] if index is None else [_of_index(index)]
        return found + ([] if states is None else [_of_states(states, lambda here: here * ranks)])

    def hand_over(self, backend: AttentionBackend, schedule: Schedule, step: Step, in_groups: _InGroups) -> Wrong:
        """Take the requests of a step out of the pools, which hold them, and let ``backend`` receive them.

        ``in_groups``: maps slots of the schedule to those of each group. Returns what is wrong afterwards. The pools
        are right in any case. Passes on what the backend raises.
        """
        requests, rows = self._requests(schedule, step, in_groups)
        if not requests:
            return []
        before = [pool.copies() for pool in self._own]
        with past_modes():
            for index, (own, of) in enumerate(zip(self._own, rows, strict=True)):
                for memory in (memory for pools in self._sent for memory in pools[index].memory):
                    memory.fill_(_ALL_ONES)
                for number, table in enumerate(own.tables):
                    held = table.read(of.own)
                    for rank, pools in enumerate(self._sent):
                        pools[index].tables[number].write(of.sent, self._of_rank(table, held, rank))
                    table.write(of.own, _nothing_like(held))
        sent = [[pool.copies() for pool in pools] for pools in self._sent]
        backend.receive(HandOver(self._senders, requests, self._rank, self._handed.ranks, self._kv_heads))
        with past_modes():
            wrong = [each for index, of in enumerate(rows) for each in self._wrong(index, before[index], of)]
            for rank, (pools, whole) in enumerate(zip(self._sent, sent, strict=True)):
                if any(pool.changed(copy) for pool, copy in zip(pools, whole, strict=True)):
                    wrong.append(Place.of("the sender's memory", rank=rank))
            for pool, copies in zip(self._own, before, strict=True) if wrong else ():
                for now, was in zip(pool.memory, copies, strict=True):
                    now.copy_(was)
        return wrong

    def _of_rank(self, table: _Table, held: torch.Tensor, rank: int) -> torch.Tensor:
        """[n, numbers]: rows of a rank of the sender. Heads that the receiver does not have are its own with other
        signs. ``held``: the receiver's rows."""
        found, start = list[torch.Tensor](), 0
        for part in table.parts:
            end = start + part.heads * part.width
            own = held[:, start:end].reshape(len(held), part.heads, part.width)
            first, start = heads_of_rank(self._rank, self._handed.ranks, part.total)[0], end
            for head in heads_of_rank(rank, self._handed.senders, part.total):
                mine = own[:, (head - first) % part.heads]
                found.append(mine if first <= head < first + part.heads else mine ^ _sign(mine.dtype))
        return torch.cat(found, 1)

    def _requests(
        self, schedule: Schedule, step: Step, in_groups: _InGroups
    ) -> tuple[tuple[HandedRequest, ...], list[_Rows]]:
        """The requests that are handed over, and the rows of each pool in the order of ``_pools``."""
        rng, page, of = np.random.default_rng(step.seed ^ 0x4A0D), self._handed.page, list[HandedRequest]()
        own_page = schedule.case.page_size
        begun = [(at, each) for at, each in enumerate(step.requests) if each.prefix]
        sender_rows = (rng.permutation(self._rows) + 1).tolist()
        state_slots = (rng.permutation(self._rows) + 1).tolist()
        tables = rng.integers(page, (self._pages + 1) * page, self._tables.shape, dtype=np.int32)
        found = [_Listed() for _ in self._groups]
        states, free_states = _Listed(), [0]
        pages = [rng.permutation(self._pages) + 1 for _ in self._groups]
        taken = 0
        to_state = None if self._context.state is None else self._context.state.req_to_state.cpu()
        for (at, each), row, state_slot in zip(begun, sender_rows, state_slots, strict=False):
            # Every second request has a part of its tokens here already, as from a prefix cache.
            kept = each.prefix // own_page // 2 * own_page * (at % 2)
            starts, count = list[int](), -(-each.prefix // page)
            mine = in_groups(schedule, each.slots[: each.prefix])
            for group, listed, order in zip(self._groups, found, pages, strict=True):
                slots = (order[taken : taken + count, None] * page + np.arange(page)).reshape(-1)[: each.prefix]
                tables[group.index, row, : each.prefix] = slots
                window = self._context.layers[group.index].sliding_window_size if len(self._groups) > 1 else -1
                start = max(kept, first_kept(each.prefix, window, own_page) if window >= 0 else 0)
                starts.append(start)
                listed.add(mine[group.index, start:], slots[start:], at, range(start, each.prefix))
                last = int(mine[group.index, -1])
                listed.free += range(last + 1, (last // own_page + 1) * own_page) if start < each.prefix else ()
            taken += count
            own_state = 0 if to_state is None else int(to_state[each.pool_row])
            states.add(np.array([own_state]), np.array([state_slot]), at, [each.prefix])
            of.append(HandedRequest(each.pool_row, row, tuple(starts), each.prefix, own_state, state_slot))
        upload_into(self._tables, torch.from_numpy(tables))
        for listed in found:
            listed.free += range(own_page)
        rows = [listed.on(self._context.device) for listed in found]
        rows += rows[:1] if self._context.index_pool is not None else []
        states.free = free_states
        return tuple(of), [*rows, *([] if to_state is None else [states.on(self._context.device)])]

    def _wrong(self, index: int, before: Sequence[torch.Tensor], of: _Rows) -> Iterator[Place]:
        """Rows of a pool that are wrong, one for each table; slots whose contents do not matter become as before."""
        pool = self._own[index]
        tokens = dict(zip(of.own.tolist(), of.tokens, strict=True))
        for table in pool.tables:
            was = table.every(before)
            table.write(of.free, was[of.free])
            now = table.every()
            slots = (now != was).any(1).nonzero()[:, 0].tolist()
            if not slots:
                continue
            slot = next((each for each in slots if each in tokens), slots[0])
            request, token = tokens.get(slot, (-1, slot))
            part, head, held = next(
                (part, head, mine)
                for (part, head, mine), (*_, right) in zip(table.heads(now[slot]), table.heads(was[slot]), strict=True)
                if not torch.equal(mine, right)
            )
            place = Place.of(
                table.what, layer=table.layer_id, request=request, token=token, part=part, head=head, count=len(slots)
            )
            yield place.holding(self._found(index, table, held, of))
        unused = zip(pool.memory, before, pool.unused, strict=False)
        if any(bool(((now != then) & free).any()) for now, then, free in unused):
            yield Place.of("memory between slots")

    def _found(self, index: int, table: _Table, held: torch.Tensor, of: _Rows) -> Place:
        """Place in the sender's memory of the numbers [width] of a head."""
        if torch.equal(held, _nothing_like(held)):
            return Place.of("nothing")
        tokens = dict(zip(of.sent.tolist(), of.tokens, strict=True))
        others = [(rank, other) for rank, pools in enumerate(self._sent) for other in pools[index].tables]
        others.sort(key=lambda pair: (pair[1].what != table.what, pair[1].layer_id != table.layer_id))
        for rank, other in others:
            for part, head, rows in other.heads(other.every()):
                if rows.dtype != held.dtype or rows.shape[-1] != len(held):
                    continue
                for slot in (rows == held).all(1).nonzero()[:, 0].tolist():
                    request, token = tokens.get(slot, (-1, slot))
                    return Place.of(
                        other.what, layer=other.layer_id, rank=rank, request=request, token=token, part=part, head=head
                    )
        return Place.of("unknown")


@dataclass
class _Listed:
    """``_Rows`` so far, on the host."""

    own: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def add(self, own: Ints, sent: Ints, request: int, tokens: Iterable[int]) -> None:
        """Add the slots of tokens of a request."""
        self.own += own.tolist()
        self.sent += sent.tolist()
        self.tokens += [(request, token) for token in tokens]

    def on(self, device: torch.device) -> _Rows:
        """The rows with their slots on a device."""
        # A page of a prefix that requests share is another request's last page only if it is full.
        own, sent, free = (
            upload(torch.tensor(each, dtype=torch.int64), device) for each in (self.own, self.sent, self.free)
        )
        return _Rows(own, sent, tuple(self.tokens), free)


def _nothing_like(rows: torch.Tensor) -> torch.Tensor:
    """Rows of the same shape whose bytes are all ``_ALL_ONES``."""
    return torch.full_like(rows, _ALL_ONES if rows.dtype == torch.uint8 else -1)


def _sign(dtype: torch.dtype) -> int:
    """The highest bit of an integer."""
    return 128 if dtype == torch.uint8 else torch.iinfo(dtype).min
