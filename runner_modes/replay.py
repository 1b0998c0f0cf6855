"""One replay as a server does it: fill the static buffers, plan, run the graph, read back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from attn_testkit.checks.observation import Observation
from attn_testkit.contract import ForwardBatch
from attn_testkit.environment import keep_device_busy
from attn_testkit.graphs.held_tensors import tensors_held_by
from attn_testkit.graphs.poison import Canaries
from attn_testkit.steps.schedule import Step
from attn_testkit.watches.past_modes import past_modes

from .batches import replay_view
from .capture import ScheduleGraphs, blocks_held, mode_suffix
from .clock import Clock
from .errors import blame
from .harness import ServerHarness, StagedStep
from .looked_at import looked_at
from .observe import observe
from .options import RunOptions
from .overlap_scheduling import device_catches_up, next_of, plans_ahead, table_writes
from .step_tensor import Filling
from .tensors.states import captured_states, commit_states


@dataclass(frozen=True)
class Replayed:
    """Results of one replay."""

    observed: Observation
    replaced: tuple[str, ...] = ()
    """Attributes whose tensors the plan replaced, if the options request it."""
    copied_into: tuple[torch.Tensor, ...] = ()
    """The replaced tensors, now with their successors' numbers. The graph may read them as long as it is replayed."""


def replay(
    graphs: ScheduleGraphs,
    step: Step,
    canaries: Canaries,
    clock: Clock,
    options: RunOptions,
    between: Callable[[], None] | None = None,
    at_once: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Replayed:
    """Run the graph of a step's bucket. ``between`` is called after planning, before the graph runs, and after it.

    ``at_once``: other work that runs at the same time.

    Raises ``RunError`` for whatever the backend raises, a host sync in its plan included unless it declares
    ``Needs.cpu_seq_lens``.
    """
    with graphs.harness.memory.step():
        return _observed(graphs, step, canaries, clock, options, between, at_once)


def _observed(
    graphs: ScheduleGraphs,
    step: Step,
    canaries: Canaries,
    clock: Clock,
    options: RunOptions,
    between: Callable[[], None] | None,
    at_once: Callable[[], AbstractContextManager[None]],
) -> Replayed:
    harness, label, bucket = graphs.harness, label_of(graphs, step), graphs.buckets[step.bucket]
    staged, replaced, copied_into = _replayed(graphs, step, clock, options, between, at_once)
    with clock.phase("read back"), blame("read back", label):
        observed = observe(
            harness,
            graphs.driver,
            staged,
            bucket.produced,
            (*bucket.given, staged.table),
            label=label,
            replay=True,
            padded=step.bucket - step.bs,
            canaries=canaries,
        )
    return Replayed(observed, replaced, copied_into)


def _replayed(
    graphs: ScheduleGraphs,
    step: Step,
    clock: Clock,
    options: RunOptions,
    between: Callable[[], None] | None,
    at_once: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[StagedStep, tuple[str, ...], tuple[torch.Tensor, ...]]:
    """Replay the graph of a step, after those of the steps that it continues.

    Returns the inputs of the step, and the last two fields of ``Replayed``.
    """
    if step.follows is not None:
        _replayed(graphs, step.follows, clock, options, None)
    harness, label, bucket = graphs.harness, label_of(graphs, step), graphs.buckets[step.bucket]
    with clock.phase("setup"):
        staged = harness.load(graphs.schedule, step, options.pattern)
        fill_static(graphs, staged)
        view = view_of(graphs, staged)
        watched = _Watched(harness, options)
        torch.cuda.synchronize()
        ahead = next_of(staged, options.pattern) if plans_ahead(staged) else None
        server_writes = table_writes(harness, staged)
        harness.begin_to_move(staged)
        done_ahead = keep_device_busy(ahead is not None)
    no_waits = not harness.capabilities.needs.cpu_seq_lens
    with clock.phase("replay"):
        with harness.memory.plan():
            plan = partial(harness.backend.init_forward_metadata_out_graph, view)
            looked_at(harness, "plan for replay", label, no_waits, plan)
            del plan
        replaced = watched.replaced()
        copied_into = watched.copy_into(replaced)
        with past_modes():
            for tensor, value in bucket.poison:
                tensor.fill_(value)
        # Memory that a server allocates for one step (such as a fresh mask) is freed before the graph's kernels end, so
        # nothing of it is kept alive here.
        del view
        if between is not None:
            between()
        with at_once(), server_writes(), blame("replay", label):
            harness.replay_graph(bucket.captured.graph)
        harness.move_in_flight(staged)
        if between is not None:
            between()
        state = captured_states(harness.context, graphs.static, staged.schedule.case.mode, step.bucket)
        if ahead is not None:
            # A server commits the states of a draft before it writes the next step's indices into the static buffers.
            commit_states(harness, staged, state, step.bucket)
            fill_static(graphs, ahead)
            following = view_of(graphs, ahead)
            device_catches_up(harness, done_ahead)
            plan = partial(harness.backend.init_forward_metadata_out_graph, following)
            looked_at(harness, "plan of the next step", label, no_waits, plan)
            del plan, following
            done_ahead()
        with blame("replay", label):
            torch.cuda.synchronize()
        if ahead is None:
            commit_states(harness, staged, state, step.bucket)
    return staged, replaced, copied_into


class _Watched:
    """The backend's tensors as they were before a plan."""

    def __init__(self, harness: ServerHarness, options: RunOptions) -> None:
        self._harness = harness
        watch = options.watch_replaced or options.copy_into_replaced
        self._blocks = blocks_held(harness) if watch else {}
        self._tensors = tensors_held_by(harness.backend, (harness.context,)) if options.copy_into_replaced else {}

    def replaced(self) -> tuple[str, ...]:
        """Attributes that now hold a tensor in other memory. A deleted one was not replaced."""
        if not self._blocks:
            return ()
        now = blocks_held(self._harness)
        return tuple(path for path, block in self._blocks.items() if now.get(path, block) != block)

    def copy_into(self, replaced: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        """Copy the successors' numbers into the replaced tensors, if the options request it."""
        if not self._tensors:
            return ()
        successors = tensors_held_by(self._harness.backend, (self._harness.context,))
        for path in replaced:
            _copy_rows(self._tensors[path], successors[path])
        return tuple(self._tensors[path] for path in replaced)


def _copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy as many rows as both tensors have: a plan for live rows has fewer. Nothing is copied if the rows differ in
    shape."""
    if target.dim() != source.dim() or target.shape[1:] != source.shape[1:]:
        return
    if target.dim():
        rows = min(target.shape[0], source.shape[0])
        target, source = target[:rows], source[:rows]
    target.copy_(source)


def label_of(graphs: ScheduleGraphs, step: Step) -> str:
    """The name of a replay in messages."""
    bucket = f"bucket {step.bucket}{mode_suffix(graphs.harness, graphs.schedule)}"
    return f"replay {step.index + 1} of {len(graphs.schedule.steps)} ({step.label}), {bucket}, {step.bs} live"


def view_of(graphs: ScheduleGraphs, staged: StagedStep) -> ForwardBatch:
    """Make the batch that the backend gets to plan a replay. Raises ``RunError``."""
    harness, static, case, bs = graphs.harness, graphs.static, graphs.schedule.case, staged.step.bucket
    spec = graphs.driver.replay_spec(harness, static, staged, bs, case.width)
    extends = graphs.driver.replay_extends(harness, static, staged, bs, graphs.fill)
    with past_modes():
        return replay_view(harness, staged, static, case.mode, bs, case.width, spec, extends)


def fill_static(graphs: ScheduleGraphs, staged: StagedStep) -> None:
    """Fill the static inputs: the live heads, then padding."""
    graphs.static.fill(Filling(graphs.harness, staged, graphs.fill))
    graphs.driver.fill(graphs.harness, graphs.static, staged, staged.step.bucket)
    graphs.static.send()
