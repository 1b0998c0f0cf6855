"""Capturing the graphs of one or several schedules on one backend instance."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_testkit.contract import ForwardBatch
from attn_testkit.environment import side_stream
from attn_testkit.graphs.capture import Captured, record, warm_up
from attn_testkit.graphs.held_tensors import block_of, tensors_held_by
from attn_testkit.graphs.poison import poisoned
from attn_testkit.model import Trace
from attn_testkit.steps.schedule import Schedule
from attn_testkit.watches.packing import Sent

from .batches import captured_batch
from .clock import Clock
from .errors import blame
from .forward import forward
from .harness import ServerHarness, mode_of
from .hook_answers import fill_value, verify_mask_of
from .mode_runner import ModeRunner
from .mode_runners import MODE_RUNNERS
from .observe import Readable, readable
from .static_inputs import StaticInputs, make_static_inputs
from .step_tensors import STEP_TENSORS
from .warm_ups import uneven_warm_ups


@dataclass(frozen=True)
class Allocated:
    """A tensor of the backend that first appeared while a graph was captured."""

    path: str
    where: str
    """The bucket, as messages name it."""
    tensor: weakref.ref[torch.Tensor]
    """A weak reference, so that the run does not keep memory alive that the backend freed."""


@dataclass(frozen=True)
class Bucket:
    """One captured batch size."""

    captured: Captured[Trace]
    batch: ForwardBatch
    """The batch that the backend got at capture: slices of the static buffers."""
    produced: tuple[Readable, ...]
    """Outputs of every replay."""
    given: tuple[Sent, ...]
    """Memory that a replay may not write."""
    poison: tuple[tuple[torch.Tensor, int], ...]
    """Outputs that a replay overwrites, as integers, and their value before the replay."""
    allocated: tuple[Allocated, ...]
    warm_up_finite: bool
    """True if no logit of the last warm-up was NaN or Inf."""
    uneven_warm_ups: tuple[str, ...]
    """Names of what differed in bits between warm-ups of one plan. Empty if determinism is not declared."""


@dataclass(frozen=True)
class ScheduleGraphs:
    """All graphs of one schedule, and so of one mode, on one backend instance."""

    harness: ServerHarness
    schedule: Schedule
    static: StaticInputs
    fill: int
    """Value of ``seq_lens`` for padded requests."""
    buckets: Mapping[int, Bucket]

    @property
    def driver(self) -> ModeRunner:
        """The functions of the schedule's mode."""
        return MODE_RUNNERS[self.schedule.case.mode]

    @property
    def allocated(self) -> tuple[Allocated, ...]:
        """Memory of all buckets, in the order of their capture."""
        return tuple(each for bucket in self.buckets.values() for each in bucket.allocated)

    @property
    def uneven_warm_ups(self) -> tuple[str, ...]:
        """Uneven warm-ups of all buckets."""
        return tuple(each for bucket in self.buckets.values() for each in bucket.uneven_warm_ups)

    @property
    def warm_up_finite(self) -> bool:
        """True if the warm-ups of all buckets were finite."""
        return all(bucket.warm_up_finite for bucket in self.buckets.values())


def mode_suffix(harness: ServerHarness, schedule: Schedule) -> str:
    """Suffix of labels, as `` of decode``, if several modes or widths share an instance."""
    several = harness.context.draft_widths or len(harness.context.modes) > 1
    return f" of {mode_of(harness, schedule)}" if several else ""


def blocks_held(harness: ServerHarness) -> dict[str, tuple[int, int]]:
    """Map the path of each device tensor that the backend holds to address and bytes of its memory."""
    held = tensors_held_by(harness.backend, (harness.context,))
    return {path: block_of(tensor) for path, tensor in held.items()}


def capture_schedules(
    harness: ServerHarness,
    schedules: Sequence[Schedule],
    pool: Any,
    clock: Clock,
    filled: Callable[[ScheduleGraphs], None] | None = None,
) -> tuple[ScheduleGraphs, ...]:
    """Initialize the backend's graph state for all schedules, then capture every bucket of each, largest first.

    ``pool``: the memory pool of all graphs. ``filled`` is called with each schedule before its captures, to fill the
    static inputs, which are those of a dummy batch. Raises ``RunError``.
    """
    harness.prepare_capture()
    with clock.phase("capture"):
        with blame("graph state"):
            harness.backend.init_cuda_graph_state(
                max(schedule.max_bs for schedule in schedules), max(schedule.max_tokens for schedule in schedules)
            )
        fill = 0 if harness.pads_with_nothing else fill_value(harness.backend)
    # A server has all its buffers before its first capture.
    static = [make_static_inputs(harness, each, fill, STEP_TENSORS) for each in schedules]
    return tuple(
        _capture_schedule(harness, schedule, inputs, fill, pool, clock, filled)
        for schedule, inputs in zip(schedules, static, strict=True)
    )


def _capture_schedule(
    harness: ServerHarness,
    schedule: Schedule,
    static: StaticInputs,
    fill: int,
    pool: Any,
    clock: Clock,
    filled: Callable[[ScheduleGraphs], None] | None,
) -> ScheduleGraphs:
    buckets: dict[int, Bucket] = {}
    if filled is not None:
        filled(ScheduleGraphs(harness, schedule, static, fill, buckets))
    for bs in schedule.buckets:
        with clock.phase("capture"):
            # Servers warm up once to three times. A backend that allocates on a later run does so in the first bucket.
            runs = 1 if buckets else 3
            buckets[bs] = _capture_bucket(harness, schedule, static, fill, bs, pool, runs)
    return ScheduleGraphs(harness, schedule, static, fill, buckets)


def _capture_bucket(
    harness: ServerHarness, schedule: Schedule, static: StaticInputs, fill: int, bs: int, pool: Any, warm_ups: int
) -> Bucket:
    case, driver, backend = schedule.case, MODE_RUNNERS[schedule.case.mode], harness.backend
    label, deterministic = f"bucket {bs}{mode_suffix(harness, schedule)}", harness.capabilities.promises.deterministic
    spec = driver.captured_spec(harness, static, bs, case.width)
    extends = driver.captured_extends(harness, static, bs, case.width, fill)
    batch = captured_batch(harness, static, case.mode, bs, case.width, spec, extends)
    with blame("plan for capture", label):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def run_once() -> Trace:
        backend.init_forward_metadata_in_graph(batch)
        return forward(harness, driver, batch, case)

    def run_from_zeros() -> Trace:
        # A dummy batch writes its keys where it reads those of its prefix: each run begins from the same page 0.
        for each in harness.memories:
            each.watch.clear_page_0()
        return run_once()

    side = side_stream()
    with blame("warm-up", label):
        warm = warm_up(run_from_zeros if warm_ups > 1 else run_once, side, warm_ups)
        uneven = uneven_warm_ups(case, label, [each.attention for each in warm], fill) if deterministic else ()
    with blame("plan before capture", label):
        backend.init_forward_metadata_before_capture(batch)
    before = set(blocks_held(harness).values())
    with blame("capture", label):
        captured = record(run_once, side, pool)
    held = tensors_held_by(backend, (harness.context,)).items()
    allocated = [Allocated(path, label, weakref.ref(t)) for path, t in held if block_of(t) not in before]
    return Bucket(
        captured=captured,
        batch=batch,
        produced=readable(harness.model, captured.outputs),
        given=static.sent(bs, spec=spec is not None, mask=verify_mask_of(harness) is None),
        poison=_poison(captured.outputs, harness.fill),
        allocated=tuple(allocated),
        warm_up_finite=warm[-1].logits is None or bool(warm[-1].logits.isfinite().all()),
        uneven_warm_ups=uneven,
    )


def _poison(trace: Trace, byte: int) -> tuple[tuple[torch.Tensor, int], ...]:
    """Outputs of the backend and their copies, from which everything else of the model is computed."""
    return tuple(
        poisoned(tensor, byte)
        for tensor in (*trace.raw, *trace.attention, *trace.of_parts, *trace.lse, *trace.of_selections)
    )
