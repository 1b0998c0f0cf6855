"""The server around a backend: pools, request table, model, and one backend instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.features.kv_sharing import reader_and_owner
from attn_testkit.cases.features.kv_splits import has_own_pools, splits_of
from attn_testkit.cases.features.row_ranks import ranks_have_no_order, row_splits_of
from attn_testkit.cases.features.server.table import SERVER_VARIANTS, dialect_of, variant_of
from attn_testkit.cases.features.server.two_batch_overlap import is_cut
from attn_testkit.cases.features.server.wider_buffers import columns_behind
from attn_testkit.cases.features.table import FEATURES
from attn_testkit.cases.layers import PERIOD
from attn_testkit.checks.failures import first_line
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import (
    ROW_FORMATS,
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Capabilities,
    Dialect,
    ForwardMode,
    KVGroup,
    KVPool,
)
from attn_testkit.contract.kv_layouts import OWN, KVLayer, KVPoolSpec
from attn_testkit.environment import scratch
from attn_testkit.families.by_layer import layers as layers_of
from attn_testkit.families.by_layer import make_data
from attn_testkit.families.family import Watch
from attn_testkit.model import Model, Trace, pack, row_width
from attn_testkit.results.names import NO_ROOM
from attn_testkit.steps.data import DTYPES, StepData
from attn_testkit.steps.kv_groups import pages_in_pool, slot_map, table_of_group
from attn_testkit.steps.ranks import slots_on_ranks
from attn_testkit.steps.schedule import Schedule, Step
from attn_testkit.watches.packing import Bytes, Sent
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload

from .compressor_pools import with_compressor
from .errors import NoRoomError, blame, no_mode_left, out_of_memory
from .handing_over import Receiver
from .head_scales import load_head_scales
from .indexing import IndexWatch, index_pool_for, index_rope_for
from .memories import memories_of
from .memory_use import MemoryUse
from .moved_rows import Mover, Wrong
from .offloading import Offloader
from .pieces import Pieces
from .pool_address import allocate_for
from .ranks import Ranks
from .row_ranks import RowRanks
from .state_pools import load_states, with_states
from .tables import Tables
from .two_batches import TwoBatches


@dataclass(frozen=True)
class StagedStep:
    """The step that the harness currently holds."""

    schedule: Schedule
    step: Step
    data: StepData
    slots: int
    """Slots of the KV pool that the schedule uses, page 0 included."""
    due: tuple[npt.NDArray[np.int64], ...] = field(repr=False)
    """Slots of each memory that the step may write: those of its tokens and the first of page 0, [n] ascending."""
    due_on_device: tuple[torch.Tensor, ...] = field(repr=False)
    """Slots of ``due`` in device memory that the backend does not get."""
    table: Sent = field(repr=False)
    """The request table."""
    rows: Bytes = field(repr=False)
    """Rows that the model looks up, [T, L, bytes]: q, k, v of a token are adjacent."""
    tokens: torch.Tensor | None = None
    """Rows of the model's table, [T] int64, host; None if they are in sequence."""

    wrong: Wrong = field(default_factory=list)
    """Places of memory that was moved before the step and is wrong."""

    @property
    def ids(self) -> torch.Tensor:
        """Values ``input_ids`` of every row, [T] int64, host."""
        return torch.from_numpy(np.arange(self.step.tokens)) if self.tokens is None else self.tokens


def mode_of(harness: ServerHarness, schedule: Schedule) -> str:
    """The mode of a schedule in messages, with its width if the instance has several."""
    case = schedule.case
    return f"{case.mode} of width {case.draft_width}" if harness.context.draft_widths else str(case.mode)


def what_alternates(harness: ServerHarness) -> Literal["modes", "widths"]:
    """Name of the property in which the schedules of an instance differ, in messages: ``modes`` or ``widths``."""
    return "widths" if harness.context.draft_widths else "modes"


def _largest(schedules: Sequence[Schedule], name: str) -> int:
    return max(int(getattr(schedule, name)) for schedule in schedules)


_CONTEXTS = [
    context
    for context in (*(each.context for each in FEATURES), *(each.context for each in SERVER_VARIANTS.values()))
    if context
]


def context_for(
    schedules: Sequence[Schedule],
    device: torch.device,
    layers: tuple[AttentionLayer, ...],
    own_layout: Callable[[KVPoolSpec], Sequence[KVLayer]] | None = None,
) -> BackendContext:
    """Make the context that a server gives the constructor of a backend for these schedules. All tables are zeros.

    ``own_layout``: lays out the KV pool if the case leaves that to the backend. Raises ``RunError`` if it raises.
    """
    case = schedules[0].case
    dtype = DTYPES[case.dtype]
    kv_dtype = dtype if case.kv_dtype == "same" else DTYPES[case.kv_dtype]
    pages, rows = max(map(pages_in_pool, schedules)), _largest(schedules, "pool_rows")
    mostly_unused = bool(variant_of(case).pool_elements)
    ctx = _largest(schedules, "max_context_len")
    spec = [s for s in schedules if s.case.mode.is_speculative()]
    verify = [s for s in schedules if s.case.tree is not None]

    def group(index: int, own: tuple[AttentionLayer, ...]) -> KVGroup:
        with blame("KV pool"):
            with_keys = tuple(layer for layer in own if layer.head_layout.has_keys)
            pool = _pool(pages, case, with_keys, kv_dtype, device, own_layout, cleared=not mostly_unused)
        table = torch.zeros(rows + 1, ctx, dtype=torch.int32, device=device)
        return KVGroup(index, tuple(layer.layer_id for layer in own), pool, table)

    splits = splits_of(case)
    turns = PERIOD if case.layers.groups else 1
    ranks = len(splits) if has_own_pools(case) else len(row_splits_of(case))
    # A rank is a group that has all layers.
    groups = (
        tuple(group(rank, layers) for rank in range(ranks))
        if ranks
        else tuple(group(index, layers[index::turns]) for index in range(turns))
    )
    return BackendContext(
        device=device,
        dtype=dtype,
        kv_pool=groups[0].kv_pool,
        req_to_token=groups[0].req_to_token,
        layers=layers,
        page_size=case.page_size,
        max_context_len=ctx,
        max_bs=_largest(schedules, "most_requests"),
        max_num_tokens=_largest(schedules, "most_tokens"),
        modes=frozenset(s.case.mode for s in schedules),
        num_draft_tokens=max([1] + [s.case.width for s in spec]),
        speculative_num_steps=max(s.spec_steps for s in schedules),
        topk=max([0] + [s.case.topk for s in verify]),
        draft_branches=max(s.case.draft.branches if s.case.draft else 0 for s in schedules),
        capture_sizes=tuple(sorted({bs for s in schedules for bs in s.buckets})),
        capture_tokens=tuple(sorted({bs * s.case.rows_at_once for s in schedules for bs in s.buckets})),
        kv_splits=splits,
        kv_groups=groups if len(groups) > 1 else (),
        index_pool=index_pool_for(schedules, layers, groups[0].kv_pool, device),
        index_rope=index_rope_for(schedules, device),
        max_extend_tokens=max([0] + [s.case.most_new for s in schedules if s.case.mode is ForwardMode.EXTEND]),
        **{name: value for asked in _CONTEXTS for name, value in asked(schedules).items()},
    )


def _pool(
    pages: int,
    case: Case,
    layers: tuple[AttentionLayer, ...],
    dtype: torch.dtype,
    device: torch.device,
    own_layout: Callable[[KVPoolSpec], Sequence[KVLayer]] | None,
    *,
    cleared: bool,
) -> KVPool:
    """Make a KV pool. Raises ``NoRoomError`` if a pool that is mostly unused does not fit."""
    try:
        return KVPool(
            pages * case.page_size, case.page_size, layers, dtype, device, case.kv_layout, own_layout, cleared=cleared,
            row_format=case.kv_dtype if case.kv_dtype in ROW_FORMATS else "",
            make=allocate_for(case, len(layers) * case.heads.layout.pool_rows, cleared=cleared),
        )  # fmt: skip
    except RuntimeError as error:
        if cleared or not out_of_memory(error):
            raise
        raise NoRoomError(f"{NO_ROOM}for a KV pool of more than 2^31 elements: {first_line(error)}") from None


def _most_keys(schedules: Sequence[Schedule], columns: int, dialect: Dialect) -> int:
    """``max_context_len`` of a server with these conventions, whose request table has this number of columns."""
    if dialect.context_len == "all" or not all(schedule.case.draft_width for schedule in schedules):
        return columns
    steps = (step for each in schedules for step in (*each.steps, each.second, each.oversized))
    return max(request.prefix for step in steps for request in step.requests)


def _reserved_memory(context: BackendContext) -> Iterator[torch.Tensor]:
    """Page 0 of each layer's keys, values, index keys and compressed rows, and slot 0 of each layer's states."""
    for group in context.groups:
        for layer_id in group.layer_ids:
            with suppress(KeyError, ValueError):  # no layer of the KV pool, or one of a layout that has no pages
                yield from (pages[0] for pages in group.kv_pool.get_kv_pages(layer_id))
    for part in context.state.pool.parts if context.state else ():
        yield part[0]
    yield from context.index_pool.memory[:, 0] if context.index_pool else ()
    if context.compressor:
        yield from context.compressor.pool.page_0()


class ServerHarness:
    """One backend instance and all memory that it may touch, for one or several schedules (modes) that share it."""

    def __init__(
        self,
        backend_class: type[AttentionBackend],
        schedules: Sequence[Schedule],
        device: torch.device,
        unowned: float = math.nan,
        fill: int = 0xFF,
        *,
        declared: Capabilities | None = None,
    ) -> None:
        """Construct the backend. Errors of its constructor are passed on; ``RunError`` if laying out its pool failed.

        ``schedules``: they differ only in what belongs to their modes; the first one's case decides dtypes, page size
        and layers. ``unowned``: contents of unowned slots, NaN, or a number to find out where a NaN came from.
        ``fill``: byte of outputs before they are written. ``declared``: the capabilities that the judge received; None
        for those of the class.
        """
        self.device, self.unowned, self.fill = device, unowned, fill
        self.deliver: Callable[[Observation], Observation] = lambda observed: observed
        """Function that receives every observation as soon as it is made, also in a run that breaks off later."""
        self.captured: Callable[[], None] = lambda: None
        """Function that is called when all graphs are captured."""
        self.compiled: list[str] = []
        """Actions of compilers and tuners inside plans and eager forwards, in their order."""
        self.waits_before_plans = False
        """True: the device is done with a step before the next one is planned (``RunOptions.wait_before_plans``)."""
        self.copies_pool = True
        """True if observations hold the KV pool."""
        self.pieces: dict[tuple[int, bool], Pieces] = {}
        """Graphs around attention, by their rows and whether q, k and v are contiguous, if a case has them."""
        self.follow: Callable[[torch.Tensor, Trace], torch.Tensor] = self._next_rows
        """Function from ids and trace of a draft's forward to ids of the next, on the device."""
        self.case: Case = schedules[0].case
        layers = tuple(layer.to(device) for layer in layers_of(self.case))
        self.capabilities = backend_class.capabilities if declared is None else declared
        self.replay_graph: Callable[[Any], None] = torch.cuda.CUDAGraph.replay
        """Function saved before the backend is constructed: a backend that replaces it could avoid replaying its
        graph."""
        own_layout = backend_class.lay_out_kv_pool if self.case.kv_layout == OWN else None
        context = with_states(context_for(schedules, device, layers, own_layout), schedules)
        context = with_compressor(context, schedules)
        requests, columns = context.req_to_token.shape
        token = len(layers), row_width(layers, context.dtype)
        most = _largest(schedules, "most_rows")
        memories = len(set(self.case.families))
        self._tables = Tables(
            len(context.groups), requests, columns, most, token, context.dtype, device, memories,
            behind=columns_behind(self.case),
        )  # fmt: skip
        self.request_tables = tables = self._tables.req_to_token
        """Request table of each KV group, [G, requests, max_context_len] int32, on the device."""
        groups = tuple(replace(each, req_to_token=tables[each.index]) for each in context.kv_groups)
        dialect = dialect_of(self.capabilities, self.case)
        most_keys = _most_keys(schedules, context.max_context_len, dialect)
        self.context = replace(
            context,
            req_to_token=tables[0],
            kv_groups=groups,
            dialect=dialect,
            max_context_len=most_keys,
            # The pool of rank 0 has the pages of the schedule in their order, and so have all index pools.
            index_req_to_token=tables[0] if context.index_pool and has_own_pools(self.case) else None,
        )
        self._is_spread = bool(variant_of(self.case).pool_elements)
        self.memories = memories_of(self.context, schedules[0])
        """The memories that outlive a step, before a step and after it: one for the layers of each family."""
        self.index = IndexWatch(self.context, schedules, most) if self.context.index_pool else None
        """Numbers of the indexer and its memory; None without an indexer."""
        for memory in _reserved_memory(self.context):
            scratch(memory)  # padded rows may all be stored there
        strided = self.capabilities.server.takes_strided_heads
        self.model = Model(self.case, layers, self._tables.rows, self._tables.hidden, strided_heads=strided)
        self._mover = self._mover_of(schedules)
        self.memory = MemoryUse()
        with self.memory.kept("persistent"), no_mode_left():
            self.backend = self._backend(backend_class)

    def _backend(self, backend_class: type[AttentionBackend]) -> AttentionBackend:
        """An instance, or the instances of all ranks or of two batches behind the interface of one."""
        if has_own_pools(self.case):
            return Ranks(backend_class, self.context, reverse=self.ranks_in_reverse)
        if self.case.row_ranks:
            return RowRanks(backend_class, self.context, self.case, reverse=self.ranks_in_reverse)
        if is_cut(self.case):
            return TwoBatches(backend_class, self.context, self.case, self.capabilities)
        return backend_class(self.context)

    @property
    def pool(self) -> Watch:
        """The watch of the first memory, which is the only one if all layers are of one family."""
        return self.memories[0].watch

    def _next_rows(self, ids: torch.Tensor, trace: Trace) -> torch.Tensor:
        """Advance each branch to its next row of the model's table.

        Padded rows may be anywhere in the table; the index of a row at its end, or of a NaN row, does not change.
        """
        return torch.where(ids < self.model.nan_row - 1, ids + 1, ids)

    @property
    def ranks_in_reverse(self) -> bool:
        """True if ranks run from the last to the first."""
        return ranks_have_no_order(self.case) and bool(self.case.derived("rank-order"))

    @property
    def pads_with_nothing(self) -> bool:
        """True if padded requests of graphs have neither rows nor keys."""
        return self.context.dialect.padded_requests == "nothing"

    def slots_in_groups(self, staged: StagedStep) -> npt.NDArray[Any]:
        """Slots of the new tokens of a step in the pool of each KV group, [G, T], or in that of each rank."""
        slots = staged.data.out_cache_loc.numpy()
        if has_own_pools(self.case):
            return slots_on_ranks(staged.schedule, staged.step, slots)
        return self.in_groups(staged.schedule, slots)

    def in_groups(self, schedule: Schedule, slots: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Map ``slots`` [...] of the schedule to the slots of each KV group's pool, [G, ...]."""
        count = len(self.context.groups)
        if count == 1 and not self._is_spread:
            return slots[None]
        maps = (slot_map(schedule, group).astype(slots.dtype) for group in range(count))
        return np.stack([found[slots] for found in maps])

    def _tables_of(self, schedule: Schedule, step: Step) -> npt.NDArray[Any]:
        """Request table of each KV group, [G, rows, max_context_len]."""
        if len(self.context.groups) == 1 or has_own_pools(self.case) or self.case.row_ranks:
            return self.in_groups(schedule, step.req_to_token)
        windows = [layer.sliding_window_size for layer in self.context.layers]
        crosses = [layer.is_cross_attention for layer in self.context.layers]
        freed = self.context.dialect.freed_pages
        tables = (
            table_of_group(schedule, step, windows[group.index], crosses[group.index], freed)
            for group in self.context.groups
        )
        maps = (slot_map(schedule, group.index).astype(step.req_to_token.dtype) for group in self.context.groups)
        return np.stack([np.where(table < 0, table, found[table]) for found, table in zip(maps, tables, strict=True)])

    def padding_slot(self, turn: int) -> int:
        """KV slot of padded rows: each that the backend supports, in turn; a capture is turn 0."""
        slots = sorted(self.capabilities.server.padding_slots, reverse=True)
        return slots[turn % len(slots)]

    def prepare_capture(self) -> None:
        """Prepare memory as a server has it at capture: an all-zero request table, page 0 zeros, no live request."""
        for each in self.memories:
            each.watch.clear()
        self._tables.clear_requests()
        self.model.select_first_keys()
        self.model.encoder_kv.clear()
        self.model.has_encoder = None
        load_head_scales(self.context.layers, None)
        if self.index:
            self.index.clear()

    def written_at_capture(self) -> tuple[int, ...]:
        """Slots outside page 0 that were written since ``prepare_capture``, ascending."""
        return tuple(slot for each in self.memories for slot in each.watch.written_since_clear().tolist())

    def load(self, schedule: Schedule, step: Step, pattern: str | None = None) -> StagedStep:
        """Put a step's numbers, KV pool and request table in place. Slots that no request owns hold ``unowned``.

        ``pattern``: numbers other than the case's (``steps/patterns.py``, ``steps/foreign_slots.py``).
        """
        # A step that is continued is not observed before.
        wrong = self._mover.settle() if self._mover else []
        with past_modes():
            data = make_data(schedule, step, pattern)
            given = data
            if step.stored:
                given = replace(data, k=torch.full_like(data.k, math.nan), v=torch.full_like(data.v, math.nan))
            elif (places := reader_and_owner(self.case)) is not None:
                k, v = data.k.clone(), data.v.clone()
                k[places[0]] = v[places[0]] = math.nan
                given = replace(data, k=k, v=v)
            packed = pack(
                given.q,
                given.k,
                given.v,
                one_row=self.case.heads.layout.values_in_keys,
                maps=self.case.head_maps,
                selected=given.selected,
            )
            hidden, rows = data.hidden.numpy(), packed.view(torch.uint8).numpy()
            due = tuple(each.due(data) for each in self.memories)
        tails = self.case.kv_dtype in self.capabilities.needs.finite_page_tails
        for each in self.memories:
            each.load(schedule, step, pattern, data, unowned=self.unowned, tails=tails)
        tables = self._tables_of(schedule, step)
        table, sent = self._tables.fill(tables, np.concatenate(due), hidden, rows.reshape(-1))
        due_on_device = torch.split(sent, [len(slots) for slots in due])
        if self.capabilities.sparse and not self.capabilities.sparse.any_padding:
            self.model.select_none_from(step.tokens)
        load_states(self.context, schedule, step)
        load_head_scales(self.context.layers, data.kv_scales)
        if self.index and schedule.case.indexer:
            self.index.load(schedule, step)
        self._load_encoder(data)
        if self._mover and step.follows is None:
            wrong += self._mover.move(self.backend, schedule, step, self.in_groups)
        slots = (schedule.num_pages + 1) * schedule.case.page_size
        return StagedStep(schedule, step, given, slots, due, due_on_device, table, rows, wrong=wrong)

    def _mover_of(self, schedules: Sequence[Schedule]) -> Mover | None:
        if self.case.handed:
            return Receiver(self.context, schedules)
        offloads = self.capabilities.offloads
        return Offloader(self.context, schedules, offloads) if self.case.offload and offloads else None

    def begin_to_move(self, staged: StagedStep) -> None:
        """Let the backend begin to move memory for which only the step waits, right before the step is planned. Raises
        ``RunError``."""
        if self._mover:
            self._mover.begin(self.backend, staged.step)

    def move_in_flight(self, staged: StagedStep) -> None:
        """Let the backend move memory while a step is in flight, if the case has that. Raises ``RunError``."""
        if self._mover:
            self._mover.in_flight(self.backend, staged.schedule, staged.step, self.in_groups)

    def wrong_in(self, staged: StagedStep) -> Wrong:
        """Places of moved memory that are wrong, before the step that is done and during it."""
        return [*staged.wrong, *(self._mover.settle() if self._mover else ())]

    def _load_encoder(self, data: StepData) -> None:
        """Give the model k and v of the encoder tokens that cross-attention layers store in the step."""
        self.model.encoder_kv.clear()
        self.model.has_encoder = None
        if data.encoder is None:
            return
        has_encoder = data.encoder.lens[data.row_request] > 0
        if not has_encoder.all():
            self.model.has_encoder = upload(has_encoder.to(data.q.dtype), self.device)
        if not len(data.encoder.slots):
            return
        for place in data.encoder.crosses.nonzero()[:, 0].tolist():
            rows = data.encoder.k[place], data.encoder.v[place]
            k, v = (upload(each.contiguous(), self.device) for each in rows)
            self.model.encoder_kv[place] = k, v
