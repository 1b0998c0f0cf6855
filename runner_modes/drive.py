"""The two drives: one eager step, and capture followed by a schedule of replays. Written against ``torch.cuda``."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.data import draft_topk
from attn_testkit.cases.schedule import Schedule, Step
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import ForwardBatch, ForwardMode
from attn_testkit.graphs.capture import Captured, capture
from attn_testkit.graphs.guard import block_of, host_syncs_forbidden, tensors_held_by
from attn_testkit.graphs.poison import Canaries, churn, fill_with_poison
from attn_testkit.model import Trace

from .asked import DriveError, fill_value
from .asked import blame as _blame
from .batches import StaticInputs, captured_batch, eager_batch, make_static_inputs, replay_view, seq_lens_of
from .decode import DECODE
from .draft_extend import DRAFT_EXTEND
from .draft_extend_v2 import DRAFT_EXTEND_V2
from .driver import ModeDriver
from .observe import observe, shape_complaints, snapshot
from .target_verify import TARGET_VERIFY
from .world import Loaded, World

__all__ = ["DRIVERS", "Clock", "DriveError", "GraphDrive", "run_eager"]

DRIVERS: dict[ForwardMode, ModeDriver] = {d.mode: d for d in (DECODE, TARGET_VERIFY, DRAFT_EXTEND, DRAFT_EXTEND_V2)}


@dataclass
class Clock:
    """Wall seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class ShapeError(Exception):
    """An output has the wrong shape, dtype or device; the model cannot go on."""


def _forward(world: World, driver: ModeDriver, batch: ForwardBatch, case: Case, stored: bool = False) -> Trace:
    rows = batch.input_ids.shape[0]
    trace = world.model.forward(world.backend, batch, lambda t: _check_shapes(world, t, rows), not stored)
    driver.finish(world, trace, batch, draft_topk(case))
    return trace


def _check_shapes(world: World, trace: Trace, rows: int) -> None:
    complaints = shape_complaints(world, trace, rows)
    if complaints:
        raise ShapeError(complaints[0])


def run_eager(
    world: World,
    schedule: Schedule,
    step: Step,
    clock: Clock,
    *,
    pattern: str | None = None,
    label: str = "",
    among: Literal["", "steps", "graphs"] = "",
) -> Observation:
    """One eager step: plan, forward, read back. Memory that the output may be given is poisoned first."""
    case, driver = schedule.case, DRIVERS[schedule.case.mode]
    with clock.phase("setup"):
        loaded = world.load(schedule, step, pattern)
        batch = eager_batch(
            world, loaded, case.mode, driver.eager_spec(world, loaded), driver.eager_extends(world, loaded)
        )
        held = snapshot(world, loaded, batch)
        _poison_heap(world, step.tokens)
    with clock.phase("eager"):
        with _blame("plan", label):
            world.backend.init_forward_metadata(batch)
        with _blame("forward", label):
            trace = _forward(world, driver, batch, case, step.stored)
            torch.cuda.synchronize()
    with clock.phase("read back"), _blame("read back", label):
        return observe(world, driver, loaded, trace, held, label=label, among=among)


def _poison_heap(world: World, tokens: int) -> None:
    """Let freed blocks of the output's size hold NaN, so that an unwritten output row shows."""
    first = world.context.layers[0]
    blocks = [
        torch.empty(tokens, first.tp_q_head_num, first.v_head_dim, dtype=dtype, device=world.device)
        for dtype in (world.context.dtype, torch.float32)
    ]
    for block in blocks:
        fill_with_poison(block, world.fill)


_CROWD_AFTER = 1
"""The replay after which an eager batch larger than any graph is run."""


@dataclass
class _Bucket:
    captured: Captured[Trace]
    batch: ForwardBatch


class GraphDrive:
    """All graphs of one mode on one backend instance."""

    def __init__(self, world: World, schedule: Schedule, pool: Any, clock: Clock) -> None:
        self.world, self.schedule, self.pool, self.clock = world, schedule, pool, clock
        self.driver = DRIVERS[schedule.case.mode]
        self.width = schedule.case.width
        self.fill = fill_value(world.backend)
        self.static: StaticInputs = make_static_inputs(world, self.width, schedule.max_bs, self.fill)
        self.buckets: dict[int, _Bucket] = {}
        self.warm_is_finite = True
        """Logits of every warm-up were finite."""
        self.born: list[tuple[str, str, weakref.ref[torch.Tensor]]] = []
        """(attribute path, bucket, tensor): what first appeared in the backend while a graph was being captured."""
        self.moved: tuple[str, ...] = ()
        """Attributes whose tensors the last ``init_forward_metadata_out_graph`` at a replay replaced."""
        self.healed: list[torch.Tensor] = []
        """With ``heal``: the tensors that were replaced, kept alive and given the numbers of their successors."""

    def capture(self) -> None:
        """Capture every bucket, largest first. The graph state must have been initialised."""
        for bs in self.schedule.buckets:
            label = f"bucket {bs}{self._mode}"
            with self.clock.phase("capture"):
                self._capture_bucket(bs, label)

    def _capture_bucket(self, bs: int, label: str) -> None:
        world, case = self.world, self.schedule.case
        spec = self.driver.captured_spec(world, self.static, bs, self.width)
        batch = captured_batch(world, self.static, case.mode, bs, self.width, self.fill, spec)
        with _blame("plan for capture", label):
            world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        phase = "warm-up"
        before: set[tuple[int, int]] = set()

        def run_once() -> Trace:
            nonlocal phase, before
            if torch.cuda.is_current_stream_capturing():
                phase = "capture"
                before = set(self._blocks().values())
            world.backend.init_forward_metadata_in_graph(batch)
            return _forward(world, self.driver, batch, case)

        try:
            captured, warm = capture(run_once, self.pool)
        except Exception as error:
            raise DriveError(phase, label) from error
        self.buckets[bs] = _Bucket(captured, batch)
        for path, tensor in tensors_held_by(world.backend, (world.context,)).items():
            if block_of(tensor) not in before:
                self.born.append((path, label, weakref.ref(tensor)))
        if warm.logits is not None:
            self.warm_is_finite &= bool(warm.logits.isfinite().all())

    def _blocks(self) -> dict[str, tuple[int, int]]:
        held = tensors_held_by(self.world.backend, (self.world.context,))
        return {path: block_of(tensor) for path, tensor in held.items()}

    def poison_born(self) -> None:
        """Memory that was born in a capture belongs to that graph, which must write it before it reads it."""
        for _, _, ref in self.born:
            tensor = ref()
            if tensor is not None:
                fill_with_poison(tensor)

    def plan(self, step: Step) -> None:
        """Prepare a replay that does not come: what an instance does while another one is between plan and replay."""
        loaded = self.world.load(self.schedule, step)
        self._fill(loaded)
        with _blame("plan for replay", f"another instance, {self._label(step)}"):
            self.world.backend.init_forward_metadata_out_graph(self._view(loaded))

    def _view(self, loaded: Loaded) -> ForwardBatch:
        world, static, bs, width = self.world, self.static, loaded.step.bucket, self.width
        spec = self.driver.replay_spec(world, static, loaded, bs, width)
        return replay_view(world, loaded, static, self.schedule.case.mode, bs, width, self.fill, spec)

    def replay(
        self,
        step: Step,
        canaries: Canaries | None,
        *,
        pattern: str | None = None,
        watch: bool = False,
        heal: bool = False,
        between: Callable[[], None] | None = None,
    ) -> Observation:
        """One replay of the schedule, as a server would do it.

        ``between``: called after planning, before the graph runs. ``watch``: note which tensors the plan replaces.
        ``heal``: give the replaced ones their successors' numbers, to find out whether the graph reads them.
        """
        world, label = self.world, self._label(step)
        with self.clock.phase("setup"):
            loaded = world.load(self.schedule, step, pattern)
            self._fill(loaded)
            view = self._view(loaded)
            bucket = self.buckets[step.bucket]
            held = snapshot(world, loaded, bucket.batch)
            blocks = self._blocks() if watch else {}
            old = tensors_held_by(world.backend, (world.context,)) if heal else {}
            torch.cuda.synchronize()
        with self.clock.phase("replay"):
            with (
                _blame("plan for replay", label),
                host_syncs_forbidden(not world.capabilities.needs_cpu_seq_lens),
            ):
                world.backend.init_forward_metadata_out_graph(view)
            if blocks:
                now = self._blocks()
                self.moved = tuple(path for path, block in blocks.items() if now.get(path, block) != block)
            if old:
                self._heal(old)
            self._poison_outputs(bucket.captured.outputs)
            # What a server allocates for one step (a fresh mask, say) is gone before the kernels that read the graph's
            # own memory end; keep nothing of it alive here.
            del view
            if between is not None:
                between()
            with _blame("replay", label):
                bucket.captured.replay()
                torch.cuda.synchronize()
        with self.clock.phase("read back"), _blame("read back", label):
            return observe(
                world,
                self.driver,
                loaded,
                bucket.captured.outputs,
                held,
                label=label,
                replay=True,
                padded=step.bucket - step.bs,
                damaged=canaries.damaged() if canaries else (),
            )

    @property
    def _mode(self) -> str:
        """For labels, where several modes share an instance."""
        return f" of {self.schedule.case.mode}" if len(self.world.context.modes) > 1 else ""

    def _label(self, step: Step) -> str:
        return (
            f"replay {step.index + 1} of {len(self.schedule.steps)} ({step.label}), "
            f"bucket {step.bucket}{self._mode}, {step.bs} live"
        )

    def _fill(self, loaded: Loaded) -> None:
        """Static inputs: first the padding, then the live heads. Tails of ``input_ids`` stay as they were."""
        step, static, data = loaded.step, self.static, loaded.data
        padding, live, tokens = self.schedule.case.padding, step.bs, step.tokens
        static.seq_lens.fill_(self.fill)
        static.seq_lens_cpu.fill_(self.fill)
        static.out_cache_loc.zero_()
        if padding != "stale":
            static.positions.zero_()
            static.req_pool_indices.zero_()
        if padding == "nan":
            static.input_ids.fill_(self.world.model.nan_row)
        static.input_ids[:tokens].copy_(torch.arange(tokens))
        static.positions[:tokens].copy_(data.positions)
        static.out_cache_loc[:tokens].copy_(data.out_cache_loc)
        static.req_pool_indices[:live].copy_(torch.tensor([r.pool_row for r in step.requests]))
        lens = torch.tensor(seq_lens_of(self.schedule.case.mode, loaded), dtype=torch.int64)
        static.seq_lens[:live].copy_(lens)
        static.seq_lens_cpu[:live].copy_(lens)
        self.driver.fill(self.world, static, loaded, step.bucket)

    def _heal(self, old: dict[str, torch.Tensor]) -> None:
        new = tensors_held_by(self.world.backend, (self.world.context,))
        for path in self.moved:
            # A plan for live rows has fewer of them.
            if new[path].dim() == old[path].dim() and new[path].shape[1:] == old[path].shape[1:]:
                rows = min(old[path].shape[:1] + new[path].shape[:1], default=None)
                target, source = (old[path], new[path]) if rows is None else (old[path][:rows], new[path][:rows])
                target.copy_(source)
            self.healed.append(old[path])

    def _poison_outputs(self, trace: Trace) -> None:
        for tensor in (*trace.raw, *trace.attention, trace.hidden, trace.logits, trace.topk_p, trace.topk_index):
            if tensor is not None:
                fill_with_poison(tensor, self.world.fill)


def _captured(world: World, schedules: list[Schedule], pool: Any, clock: Clock) -> list[GraphDrive]:
    world.prepare_capture()
    with clock.phase("capture"), _blame("graph state"):
        world.backend.init_cuda_graph_state(
            max(schedule.max_bs for schedule in schedules), max(schedule.max_tokens for schedule in schedules)
        )
    drives = [GraphDrive(world, schedule, pool, clock) for schedule in schedules]
    for drive in drives:
        drive.capture()
    return drives


def drive_graphs(
    world: World,
    schedules: list[Schedule],
    clock: Clock,
    *,
    eager: bool = True,
    pattern: str | None = None,
    poison_born: bool = True,
    watch: bool = False,
    heal: bool = False,
    neighbour: World | None = None,
) -> tuple[list[tuple[Schedule, Observation]], list[GraphDrive]]:
    """Capture all buckets of all schedules on one instance, then replay them interleaved, eager steps between.

    ``neighbour``: another instance with a pool of its own, as of a draft model beside its target, that captures graphs
    of the first schedule and plans whenever this one is between planning and replaying.

    ``eager``: some steps are also run eagerly on the same instance, right after their replay; and a batch that is
    larger than any graph is run between replays. In half of the cases an eager step comes before there are graphs: a
    small one, so that what grows on demand still grows under the graphs.
    """
    seen: list[tuple[Schedule, Observation]] = []
    before: list[tuple[Schedule, Observation]] = []
    if eager and world.case.digest >> 13 & 1:
        first = schedules[0]
        short = min(first.steps, key=lambda step: step.tokens)
        before.append((first, run_eager(world, first, short, clock, label="eager run before there are graphs")))
    pool = torch.cuda.graph_pool_handle()
    drives = _captured(world, schedules, pool, clock)
    other = _captured(neighbour, schedules[:1], pool, clock)[0] if neighbour else None
    with clock.phase("setup"):
        gc.collect()
        canaries = churn()
    for index in range(max(len(s.steps) for s in schedules)):
        for drive in drives:
            if index >= len(drive.schedule.steps):
                continue
            step = drive.schedule.steps[index]
            if poison_born:
                for each in drives:
                    each.poison_born()
            between = partial(other.plan, other.schedule.steps[index - 1]) if other and drive is drives[0] else None
            observed = drive.replay(step, canaries, pattern=pattern, watch=watch, heal=heal, between=between)
            # Large batches between replays: an eager step may need more room than any graph.
            crowded = index == _CROWD_AFTER and drive is drives[0]
            if eager and (step.eager_too or crowded):
                batch = drive.schedule.crowd if crowded else step
                which = f" ({batch.label}, {batch.bs} requests)" if crowded else ""
                label = f"eager run{which} after {observed.label}"
                twin = run_eager(world, drive.schedule, batch, clock, pattern=pattern, label=label, among="graphs")
                with clock.phase("setup"):
                    # The eager step may have freed what a graph still uses.
                    canaries.blocks += churn().blocks
                seen.append((drive.schedule, twin))
                observed = replace(observed, eager_run=None if crowded else twin)
            seen.append((drive.schedule, observed))
    # What replays show is told first.
    return seen + before, drives
