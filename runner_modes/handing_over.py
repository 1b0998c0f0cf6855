"""Requests that another instance hands over: the memory of its ranks, and what ``receive`` makes of it, bit for bit.

Extend compares the rows that a prefill leaves in a pool, bit for bit. So the kit fills the sender's pools itself: with
the rows that the receiver's pools should get, in the sender's pages, and with other rows for heads of other ranks. The
receiver's slots hold NaN until ``receive`` has run. After a mistake the kit puts the right rows there, so that other
checks see a step that had the right memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from typing_extensions import override

from attn_testkit.cases.features.handed import handed_of, state_key_heads
from attn_testkit.checks.places import Place
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
from attn_testkit.steps.kv_groups import first_kept
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload_into

from .errors import blame
from .moved_rows import (
    ALL_ONES,
    InGroups,
    Listed,
    Mover,
    Pool,
    Rows,
    Table,
    Wrong,
    found_in,
    nothing_like,
    pools_of,
    sign_of,
    wrong_rows,
)

_SPARE_PAGES = 3


def _with_heads(layer: AttentionLayer, heads: int) -> AttentionLayer:
    """A layer of keys with as many KV heads, and as many query heads for each."""
    if layer.head_layout.values_in_keys:
        return layer
    return replace(layer, tp_k_head_num=heads, tp_q_head_num=layer.tp_q_head_num // layer.tp_k_head_num * heads)


class Receiver(Mover):
    """The pools of an instance, and those of the ranks from which it receives requests."""

    def __init__(self, context: BackendContext, schedules: Sequence[Schedule]) -> None:
        """Allocate the memory of the sender, which the first schedule's case describes."""
        case, handed = schedules[0].case, handed_of(schedules[0].case)
        assert handed is not None
        self._context, self._handed = context, handed
        self._rank = case.derived("receiving-rank", handed.ranks)
        self._kv_heads = handed.total(case.heads.kv_heads)
        self._state_keys = 0 if context.state is None else state_key_heads(case, handed)
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

        keys = len(heads_of_rank(0, handed.senders, self._state_keys))
        layers = tuple(
            replace(each, tp_k_head_num=keys, tp_q_head_num=each.v_heads * handed.ranks // handed.senders)
            for each in own.layers
        )
        return StatePool(
            self._rows + 1, layers, own.conv_dtype, own.dtype, own.device, own.order,
            strided=own.strided, more_columns=own.more_columns,
        )  # fmt: skip

    def _pools(
        self, groups: Sequence[KVGroup], index: IndexPool | None, states: StatePool | None, ranks: int
    ) -> list[Pool]:
        """The pools of one of ``ranks`` ranks: those of groups, of index keys, of states."""
        return pools_of(
            groups, index, states, lambda here: self._handed.heads or here * ranks,
            lambda here, of_values: here * ranks if of_values else self._state_keys,
        )  # fmt: skip

    @override
    def move(self, backend: AttentionBackend, schedule: Schedule, step: Step, in_groups: InGroups) -> Wrong:
        """Let another instance hand the requests of a step over."""
        requests, rows = self._requests(schedule, step, in_groups)
        if not requests:
            return []
        before = [pool.copies() for pool in self._own]
        with past_modes():
            for index, (own, of) in enumerate(zip(self._own, rows, strict=True)):
                for memory in (memory for pools in self._sent for memory in pools[index].memory):
                    memory.fill_(ALL_ONES)
                for number, table in enumerate(own.tables):
                    held = table.read(of.own)
                    for rank, pools in enumerate(self._sent):
                        pools[index].tables[number].write(of.sent, self._of_rank(table, held, rank))
                    table.write(of.own, nothing_like(held))
        sent = [[pool.copies() for pool in pools] for pools in self._sent]
        with blame("receive", step.label):
            backend.receive(
                HandOver(self._senders, requests, self._rank, self._handed.ranks, self._kv_heads, self._state_keys)
            )
        with past_modes():
            wrong = [each for index, of in enumerate(rows) for each in self._wrong(index, before[index], of)]
            for rank, (pools, whole) in enumerate(zip(self._sent, sent, strict=True)):
                if any(pool.changed(copy) for pool, copy in zip(pools, whole, strict=True)):
                    wrong.append(Place.of("the sender's memory", rank=rank))
            for pool, copies in zip(self._own, before, strict=True) if wrong else ():
                for now, was in zip(pool.memory, copies, strict=True):
                    now.copy_(was)
        return wrong

    def _of_rank(self, table: Table, held: torch.Tensor, rank: int) -> torch.Tensor:
        """[n, numbers]: rows of a rank of the sender. Heads that the receiver does not have are its own with other
        signs. ``held``: the receiver's rows."""
        found, start = list[torch.Tensor](), 0
        for part in table.parts:
            end = start + part.heads * part.width
            own = held[:, start:end].reshape(len(held), part.heads, part.width)
            first, start = heads_of_rank(self._rank, self._handed.ranks, part.total)[0], end
            for head in heads_of_rank(rank, self._handed.senders, part.total):
                mine = own[:, (head - first) % part.heads]
                found.append(mine if first <= head < first + part.heads else mine ^ sign_of(mine.dtype))
        return torch.cat(found, 1)

    def _requests(
        self, schedule: Schedule, step: Step, in_groups: InGroups
    ) -> tuple[tuple[HandedRequest, ...], list[Rows]]:
        """The requests that are handed over, and the rows of each pool in the order of ``_pools``."""
        rng, page, of = np.random.default_rng(step.seed ^ 0x4A0D), self._handed.page, list[HandedRequest]()
        own_page = schedule.case.page_size
        begun = [(at, each) for at, each in enumerate(step.requests) if each.prefix]
        sender_rows = (rng.permutation(self._rows) + 1).tolist()
        state_slots = (rng.permutation(self._rows) + 1).tolist()
        tables = rng.integers(page, (self._pages + 1) * page, self._tables.shape, dtype=np.int32)
        found = [Listed() for _ in self._groups]
        states, free_states = Listed(), [0]
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

    def _wrong(self, index: int, before: Sequence[torch.Tensor], of: Rows) -> Iterator[Place]:
        tokens = dict(zip(of.sent.tolist(), of.tokens, strict=True))

        def held_in(like: Table, held: torch.Tensor) -> Place:
            sent = (
                (table, rank, tokens, table.every())
                for rank, pools in enumerate(self._sent)
                for table in pools[index].tables
            )
            return found_in(sent, like, held)

        return wrong_rows(self._own[index], before, of, held_in)
