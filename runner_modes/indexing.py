"""The indexer: its numbers on the device, its pool before and after a step, and a wrapper between model and backend.

``WithIndexer`` is a backend to the model. It makes the real backend store index keys and select, as the indexer of a
server's layer does before attention. Device work only, so all of it may be captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

from attn_testkit.cases.features.kv_splits import has_own_pools, splits_of
from attn_testkit.cases.features.server.table import variant_of
from attn_testkit.cases.features.server.wider_buffers import columns_behind
from attn_testkit.cases.fields import Fields
from attn_testkit.cases.indexing import Indexing
from attn_testkit.checks.failures import first_line
from attn_testkit.checks.observation import Bytes, Piece
from attn_testkit.contract import (
    INDEX_PAGE,
    INDEX_WIDTH,
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    IndexPool,
    KVPool,
)
from attn_testkit.model import Attends, Trace, with_columns_behind
from attn_testkit.results.names import NO_ROOM
from attn_testkit.steps.index_data import IndexData, index_layers, index_memory, make_index_data, scale_of
from attn_testkit.steps.index_rope import before_rotation, turns_of
from attn_testkit.steps.kv_groups import slot_map
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.spread_watch import slots_around
from attn_testkit.watches.uploads import upload, upload_into

from .errors import NoRoomError, out_of_memory
from .pool_address import allocate_for
from .returned import check_returned

_WEIGHT_BYTES = 4
_FINITE = 0x3C
"""Byte of rows that no step has filled; graphs are captured on token 0."""


def index_pool_for(
    schedules: Sequence[Schedule], layers: Sequence[AttentionLayer], pool: KVPool, device: torch.device
) -> IndexPool | None:
    """The index pool of an instance whose KV pool is ``pool``; None without an indexer.

    Raises ``NoRoomError`` if one that is mostly unused does not fit.
    """
    case = next((each.case for each in schedules if each.case.indexer), None)
    if case is None or case.indexer is None:
        return None
    ids, large = [layers[place].layer_id for place in index_layers(case)], bool(variant_of(case).pool_elements)
    try:
        replicas = _replicas(case)
        make = allocate_for(case, replicas * len(ids), cleared=not large)
        return IndexPool(pool.num_slots, ids * replicas, scale_of(case), device, make)
    except RuntimeError as error:
        if not large or not out_of_memory(error):
            raise
        raise NoRoomError(f"{NO_ROOM}for an index pool of more than 2^31 bytes: {first_line(error)}") from None


_SCALES = 3


def index_rope_for(schedules: Sequence[Schedule], device: torch.device) -> torch.Tensor | None:
    """``BackendContext.index_rope`` of an instance; None if the backend rotates nothing."""
    case = next((each.case for each in schedules if each.case.indexer), None)
    if case is None or case.indexer is None or case.indexer.rotates == "none":
        return None
    return turns_of(torch.arange(max(each.max_context_len + each.case.width for each in schedules), device=device))


def _before_rotation(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], positions: torch.Tensor, context: BackendContext, style: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index queries, weights and keys as a backend gets them that rotates and quantizes. The scale of each head's
    queries is 1/2, 1 or 2, which its weight does not include.
    """
    (q, weights, k), table = rows, context.index_rope
    assert table is not None
    turns, scale = table[positions], torch.exp2(torch.arange(q.shape[1], device=q.device) % _SCALES - 1.0)
    queries, keys = (before_rotation(each, turns, style) for each in (q, k))
    return (queries * scale[:, None]).to(context.dtype), weights.div_(scale), keys.to(context.dtype)


def _replicas(case: Fields) -> int:
    """Number of index pools: one for each rank with its own KV pool."""
    return len(splits_of(case)) if has_own_pools(case) else 1


def replica_of(pool: IndexPool, rank: int, ranks: int) -> IndexPool:
    """The index pool of a rank. ``pool`` has the layers of rank 0, then those of rank 1, and so on."""
    count, found = len(pool.layer_ids) // ranks, copy(pool)
    found.layer_ids = pool.layer_ids[:count]
    found.memory = pool.memory[rank * count : (rank + 1) * count]
    return found


def _planes(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [layers, pages, 64, 128] and scales [layers, pages, 64, 4] of ``memory``, bytes: views."""
    by_token, end = (*memory.shape[:2], INDEX_PAGE, -1), INDEX_PAGE * INDEX_WIDTH
    return memory[..., :end].view(by_token), memory[..., end:].view(by_token)


def _copy_slots(source: torch.Tensor, slots: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
    """Copy index keys of ``slots`` [n] int64 to ``places`` [n] of other memory, both [layers, pages, 64 * 132]."""
    at, to = ((each // INDEX_PAGE, each % INDEX_PAGE) for each in (slots, places))
    for plane, other in zip(_planes(source), _planes(target), strict=True):
        other[:, to[0], to[1]] = plane[:, at[0], at[1]]


class _Spread:
    """The slots of a schedule in an index pool that is mostly unused; the rest of the pool is never touched."""

    def __init__(self, context: BackendContext, schedule: Schedule) -> None:
        assert context.index_pool is not None
        self._memory, places = context.index_pool.memory, slot_map(schedule, 0)
        around = slots_around(places, context.kv_pool.num_slots, context.page_size)
        self._slots, self._places, self._around = (
            upload(torch.from_numpy(each), context.device) for each in (np.arange(len(places)), places, around)
        )
        layers, _, page = self._memory.shape
        shape = layers, -(-len(places) // INDEX_PAGE), page
        self._nan, self._held = (torch.full(shape, 0xFF, dtype=torch.uint8, device=context.device) for _ in range(2))

    def fill(self, before: torch.Tensor | None) -> None:
        """Fill the slots with ``before`` [layers, pages, 64 * 132], as the schedule numbers them, or NaN. Neighboring
        slots, as far as a tile of keys reaches, hold NaN.
        """
        _copy_slots(self._nan, self._around * 0, self._memory, self._around)
        _copy_slots(self._nan if before is None else before, self._slots, self._memory, self._places)

    def held(self) -> torch.Tensor:
        """[layers, pages, 64 * 132]: contents of the slots, as the schedule numbers them. Valid until the next call."""
        _copy_slots(self._memory, self._places, self._held, self._slots)
        return self._held


class IndexWatch:
    """Numbers of the indexer for a step, and the index pool before it."""

    def __init__(self, context: BackendContext, schedules: Sequence[Schedule], rows: int) -> None:
        """Allocate the table. ``rows``: most tokens that can have their own numbers."""
        assert context.index_pool is not None
        self.pool, self._device = context.index_pool, context.device
        case = next(each.case for each in schedules if each.case.indexer)
        assert case.indexer is not None
        self._heads, self._dtype, self._columns_behind = case.indexer.heads, context.dtype, columns_behind(case)
        sizes = self._heads * INDEX_WIDTH, self._heads * _WEIGHT_BYTES, INDEX_WIDTH * context.dtype.itemsize
        self._ends = np.cumsum(sizes).tolist()
        # The last row holds NaN, as that of the model's table does.
        shape = (rows + 1, case.layers.count, self._ends[-1])
        self._table = torch.full(shape, 0xFF, dtype=torch.uint8, device=context.device)
        self._table[:-1].fill_(_FINITE)
        self._before = torch.empty(0, dtype=torch.uint8)
        self._spread = _Spread(context, schedules[0]) if variant_of(case).pool_elements else None

    def clear(self) -> None:
        """Prepare memory as a server has it at capture: page 0 zeros, NaN everywhere else."""
        if self._spread:
            self._spread.fill(None)
        else:
            self.pool.memory.fill_(0xFF)
        self.pool.memory[:, :1].zero_()

    def load(self, schedule: Schedule, step: Step) -> None:
        """Put a step's numbers and the pool before it in place."""
        with past_modes():
            data = make_index_data(schedule, step)
            packed = _packed(data)
            self._before = index_memory(schedule, step, after=step.stored).repeat(_replicas(schedule.case), 1, 1)
        before = upload(self._before, self._device)
        with past_modes():
            if len(packed):
                upload_into(self._table[: len(packed)], packed)
            if self._spread:
                self._spread.fill(before)
                return
            self.pool.memory.fill_(0xFF)
            self.pool.memory[:, : before.shape[1]].copy_(before)

    def look(self) -> tuple[tuple[torch.Tensor, int], ...]:
        """Bytes of the pool on the device, and their number."""
        held = self._spread.held() if self._spread else self.pool.memory[:, : self._before.shape[1]]
        return ((held.reshape(-1), held.numel()),)

    def changes(self, now: Bytes) -> list[Piece]:
        """Places of the bytes that a step changed, and their values; ``now``: the bytes of ``look``, on the host."""
        at = np.flatnonzero(now != self._before.numpy().reshape(-1))
        held = now[at]
        return [
            Piece("index", "at", torch.int64, at.shape, at.astype(np.int64).view(np.uint8)),
            Piece("index", "now", torch.uint8, held.shape, held),
        ]

    def rows(self, ids: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, 128] e4m3, weights [T, heads] float32 and k [T, 128] of the layer of number ``place``."""
        packed = self._table.index_select(0, ids)[:, place]
        first, second, end = self._ends
        parts = packed[:, :first], packed[:, first:second], packed[:, second:end]
        q, weights, k = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        q = q.view(torch.float8_e4m3fn).view(-1, self._heads, INDEX_WIDTH)
        weights = with_columns_behind(weights.view(torch.float32), self._columns_behind, math.nan)
        return q, weights, k.view(self._dtype)


def _packed(data: IndexData) -> torch.Tensor:
    """[T, L, bytes] uint8."""
    if not data.k.shape[1]:
        # torch may give an empty tensor strides that it then refuses.
        return torch.empty(0, dtype=torch.uint8)
    parts = data.q.flatten(2), data.weights, data.k
    return torch.cat([part.transpose(0, 1).contiguous().view(torch.uint8) for part in parts], -1)


class WithIndexer:
    """A backend that selects the keys to which it attends, for one forward of the model."""

    def __init__(self, harness: Any, indexer: Indexing, attends: Attends, before: WithIndexer | None = None) -> None:
        """``attends``: the backend, or a wrapper of it, that receives the selections. ``before``: that of the forward
        before, in the same draft."""
        self._harness, self._indexer, self._attends = harness, indexer, attends
        self._kept = before._copies if before and indexer.first else {}
        self._last: torch.Tensor | None = None
        self._copies: dict[int, torch.Tensor] = {}
        self._returned: list[torch.Tensor] = []

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        selected: torch.Tensor,
        **named: Any,
    ) -> torch.Tensor:
        """Select and attend. Raises ``ShapeError``; passes errors on."""
        backend, place = self._harness.backend, self._harness.context.layers.index(layer)
        if not save_kv_cache:
            named["save_kv_cache"] = False
        rows = self._harness.index.rows(batch.input_ids, place)
        if self._indexer.rotates != "none":
            rows = _before_rotation(rows, batch.positions, self._harness.context, self._indexer.rotates)
        q_index, weights, k_index = rows
        if self._indexer.fused:
            inputs = {"q_index": q_index, "index_weights": weights, "k_index": k_index}
            result: torch.Tensor = backend.forward(q, k, v, layer, batch, **named, **inputs)
            return result
        if place in self._kept:
            # The server's copy: the backend may have one buffer for the selections of all layers.
            self._last = self._copies[place] = self._kept[place]
        elif not layer.reuses_selection:
            if save_kv_cache:
                backend.store_index(k_index, layer, batch)
            self._last = backend.select(q_index, weights, layer, batch)
            name = f"select of layer {layer.layer_id}"
            check_returned(
                name, self._last, ((len(q), layer.topk),), torch.int32, self._harness.device, "as indices are"
            )
            self._returned.append(self._last)
            self._copies[place] = self._last.clone(memory_format=torch.contiguous_format)
        assert self._last is not None
        named["selected"] = self._last if self._indexer.is_exact else selected
        result = self._attends.forward(q, k, v, layer, batch, **named)
        return result

    def leave_in(self, trace: Trace) -> None:
        """Add the selections to the trace of the forward."""
        trace.selections, trace.of_selections = self._copies, self._returned
