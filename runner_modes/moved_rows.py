"""Rows of pools that a backend moves, from another instance or from the host, as tables of bits.

The kit moves rows itself through these tables, and compares all memory with what it should be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attn_testkit.checks.places import Place
from attn_testkit.contract import AttentionBackend, IndexPool, KVGroup, KVPool, StatePool
from attn_testkit.contract.index_pool import keys_of, scales_of
from attn_testkit.contract.kv_layouts import between, place_of, slot_dims
from attn_testkit.steps.schedule import Ints, Schedule, Step
from attn_testkit.watches.pool_rows import BITS
from attn_testkit.watches.uploads import upload

ALL_ONES = 0xFF
"""A byte of memory that holds nothing: NaN in every dtype of numbers."""
InGroups = Callable[[Schedule, Ints], Ints]
"""Maps slots of a schedule to those of each KV group's pool, [G, ...]."""
Wrong = list[Place]


class Mover(ABC):
    """Memory that a backend moves before a step, as a server asks it to."""

    @abstractmethod
    def move(self, backend: AttentionBackend, schedule: Schedule, step: Step, in_groups: InGroups) -> Wrong:
        """Take rows of a step out of the pools, which hold them, and let ``backend`` bring them back.

        Returns what is wrong afterwards. The pools are right in any case. Raises ``RunError`` for what the backend
        raises.
        """

    def begin(self, backend: AttentionBackend, step: Step) -> None:  # noqa: B027
        """Let ``backend`` begin to bring rows back for which only it waits: the step is planned at once. Raises
        ``RunError``, likewise."""

    def in_flight(  # noqa: B027
        self, backend: AttentionBackend, schedule: Schedule, step: Step, in_groups: InGroups
    ) -> None:
        """Let ``backend`` move memory while the step is in flight. Raises ``RunError``, likewise."""

    def settle(self) -> Wrong:
        """Return what is wrong after ``in_flight``, once the step is done. The pools are as without it."""
        return []


@dataclass(frozen=True)
class Part:
    """Heads that follow each other in a row: of K, or the channels of q in a window."""

    heads: int
    total: int
    """Heads of the model, on all ranks together."""
    width: int
    """Numbers of a head."""


@dataclass(frozen=True)
class Table:
    """Rows of one layer, by slot."""

    what: str
    """Kind of the rows, as ``Place.words`` has it."""
    layer_id: int
    bits: torch.Tensor = field(repr=False)
    """[*slots, *row] integers: a view of memory."""
    sizes: tuple[int, ...]
    """Sizes of the dimensions that count slots."""
    parts: tuple[Part, ...]
    memory: int
    """Number of the block of memory, among those of the pool."""

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, numbers]: rows of slots [n] int64."""
        return self.bits[place_of(slots, self.sizes)].reshape(
            len(slots), sum(part.heads * part.width for part in self.parts)
        )

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
class Pool:
    """The tables of one pool, and all its memory."""

    tables: tuple[Table, ...]
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


def _of_keys(pool: KVPool, total: Callable[[int], int]) -> Pool:
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
            tables.append(Table(what, layer.layer_id, bits, sizes, (Part(here, total(here), width),), at))
    unused = [between(whole, views) for whole, views in pool.pieces]
    wide = [each.repeat_interleave(pool.dtype.itemsize) for each in unused]
    return Pool(tuple(tables), memory, tuple(wide))


def _of_index(pool: IndexPool) -> Pool:
    tables = []
    for layer_id in pool.layer_ids:
        buffer = pool.get_index_buffer(layer_id)
        keys = keys_of(buffer).view(torch.uint8)
        scales = scales_of(buffer).view(torch.int32)
        for what, bits in (("index keys", keys), ("index scales", scales)):
            width = math.prod(bits.shape[2:])
            tables.append(Table(what, layer_id, bits, tuple(bits.shape[:2]), (Part(1, 1, width),), 0))
    return Pool(tuple(tables), (pool.memory.view(-1),))


def _of_states(pool: StatePool, total: Callable[[int, bool], int]) -> Pool:
    tables, used = [], torch.zeros(pool.memory.numel(), dtype=torch.bool, device=pool.device)
    for layer in pool.layers:
        window, state = pool.conv(layer.layer_id), pool.temporal(layer.layer_id)
        parts = tuple(
            Part(heads, total(heads, part == layer.of_kind.value_part), width * window.shape[2])
            for part, (heads, width) in enumerate(layer.channels)
        )
        one = (Part(layer.v_heads, total(layer.v_heads, True), layer.v_dim * layer.k_dim),)
        for what, view, of in (("window", window, parts), ("state", state, one)):
            if view.numel():
                bits = view.view(BITS[view.dtype.itemsize])
                tables.append(Table(what, layer.layer_id, bits, (pool.num_slots,), of, 0))
                # A number has as many marks as bytes.
                size = view.dtype.itemsize
                marks = used.as_strided(
                    (*view.shape, size), (*(step * size for step in view.stride()), 1), view.storage_offset() * size
                )
                marks.fill_(True)
    return Pool(tuple(tables), (pool.memory,), (~used,))


@dataclass(frozen=True)
class Rows:
    """Rows that move to slots of one pool."""

    own: torch.Tensor
    """[n] int64: slots of the pool."""
    sent: torch.Tensor
    """[n] int64: slots in the memory that they come from: the sender's, or the host's."""
    tokens: tuple[tuple[int, int], ...]
    """Request of the step, and its token, of each row; of a state the request's number of tokens."""
    free: torch.Tensor
    """Slots whose contents do not matter: the rest of a request's last page, and page 0."""


@dataclass
class Listed:
    """``Rows`` so far, on the host."""

    own: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def add(self, own: Ints, sent: Ints, request: int, tokens: Iterable[int]) -> None:
        """Add the slots of tokens of a request."""
        self.own += own.tolist()
        self.sent += sent.tolist()
        self.tokens += [(request, token) for token in tokens]

    def on(self, device: torch.device) -> Rows:
        """The rows with their slots on a device."""
        # A page of a prefix that requests share is another request's last page only if it is full.
        own, sent, free = (
            upload(torch.tensor(each, dtype=torch.int64), device) for each in (self.own, self.sent, self.free)
        )
        return Rows(own, sent, tuple(self.tokens), free)


def nothing_like(rows: torch.Tensor) -> torch.Tensor:
    """Rows of the same shape whose bytes are all ``ALL_ONES``."""
    return torch.full_like(rows, ALL_ONES if rows.dtype == torch.uint8 else -1)


def pools_of(
    groups: Sequence[KVGroup],
    index: IndexPool | None,
    states: StatePool | None,
    keys_in_all: Callable[[int], int],
    states_in_all: Callable[[int, bool], int],
) -> list[Pool]:
    """The pools of an instance: those of KV groups, of index keys, of states. The functions map the number of heads of
    this rank to that of all ranks; the bool says whether they are value heads."""
    found = [_of_keys(group.kv_pool, keys_in_all) for group in groups]
    found += [] if index is None else [_of_index(index)]
    return found + ([] if states is None else [_of_states(states, states_in_all)])


def wrong_rows(
    pool: Pool,
    before: Sequence[torch.Tensor],
    of: Rows,
    held_in: Callable[[Table, torch.Tensor], Place],
    stage: int = 0,
) -> Iterator[Place]:
    """Rows of a pool that are wrong, one for each table; slots whose contents do not matter become as before.

    ``before``: all memory as it should be. ``held_in``: finds the numbers [width] of a head among those that were
    moved.
    """
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
            table.what, layer=table.layer_id, request=request, token=token, part=part, head=head, count=len(slots),
            stage=stage,
        )  # fmt: skip
        yield place.holding(Place.of("nothing") if torch.equal(held, nothing_like(held)) else held_in(table, held))
    unused = zip(pool.memory, before, pool.unused, strict=False)
    if any(bool(((now != then) & free).any()) for now, then, free in unused):
        yield Place.of("memory between slots", stage=stage)


def found_in(
    sources: Iterable[tuple[Table, int, dict[int, tuple[int, int]], torch.Tensor]], like: Table, held: torch.Tensor
) -> Place:
    """Place with the numbers [width] of a head, first in rows of the kind of ``like``.

    ``sources``: a table, the rank that has it, request and token by slot, and its rows [slots, numbers].
    """
    near = sorted(sources, key=lambda each: (each[0].what != like.what, each[0].layer_id != like.layer_id))
    for table, rank, tokens, every in near:
        for part, head, rows in table.heads(every):
            if rows.dtype != held.dtype or rows.shape[-1] != len(held):
                continue
            for slot in (rows == held).all(1).nonzero()[:, 0].tolist():
                request, token = tokens.get(slot, (-1, slot))
                return Place.of(
                    table.what, layer=table.layer_id, rank=rank, request=request, token=token, part=part, head=head
                )
    return Place.of("unknown")


def sign_of(dtype: torch.dtype) -> int:
    """The highest bit of an integer."""
    return 128 if dtype == torch.uint8 else torch.iinfo(dtype).min
