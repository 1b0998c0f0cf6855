"""The graph run: capture everything on one instance, then a schedule of replays with eager steps between them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from attn_testkit.checks.observation import Observation
from attn_testkit.contract import Capabilities
from attn_testkit.graphs.poison import Canaries, churn, fill_with_poison
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import Schedule, Step

from .capture import ScheduleGraphs, capture_schedules
from .clock import Clock
from .co_resident import CoResidentGraphs
from .eager import eager_by_turns, run_eager
from .harness import ServerHarness, what_alternates
from .kept_state import KeptState
from .memory_bounded import memory_bounded
from .options import RunOptions
from .replay import fill_static, replay, view_of

_OVERSIZED_AFTER = 1
"""Index of the replay after which an eager batch larger than any graph is run."""


@dataclass(frozen=True)
class AllocatedInCapture:
    """Memory that the backend first held while a graph was captured, so it belongs to that graph."""

    path: str
    """Attributes from the backend on, such as ``_plans[4].lens``."""
    where: str
    """The bucket, as ``bucket 4``, with the mode if several share the instance."""


@dataclass(frozen=True)
class GraphRun:
    """Results of a graph run. It is plain data and keeps no graph and no memory of the backend alive."""

    observed: tuple[tuple[Schedule, Observation], ...]
    """Replays and eager steps, in the order of their messages: a step that ran eagerly right after its replay comes
    before the replay, and a step that ran before any capture comes last."""
    fill: int
    """Value of ``seq_lens`` for padded requests: 0 or 1."""
    not_finite_in_warm_up: tuple[Schedule, ...] = ()
    """Schedules with NaN or Inf in the logits of a warm-up, in which every ``seq_lens`` is ``fill``."""
    uneven_warm_ups: tuple[str, ...] = ()
    """Places in which a warm-up gave different bits from the first of the same plan."""
    written_at_capture: tuple[int, ...] = ()
    """Slots outside page 0 that warm-ups and captures wrote, although every ``out_cache_loc`` is 0; ascending."""
    allocated_in_capture: tuple[AllocatedInCapture, ...] = ()
    """Memory that was allocated in captures, in their order."""
    replaced: tuple[str, ...] = ()
    """Attributes whose tensors the plan for some replay replaced. Empty unless the options ask for it."""
    restored: tuple[str, ...] = ()
    """Attributes whose tensors a forward changed, and that were restored. Empty unless the options ask for it."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Facts of device memory, as in ``CaseResult.memory``. Empty if options were given."""
    unbounded: tuple[Finding, ...] = ()
    """Finding of a replay that allocates more memory each time."""

    def replay_of(self, step: Step) -> Observation | None:
        """The replay of a step; None if the run had none."""
        return next((seen for _, seen in self.observed if seen.replay and seen.step is step), None)


def in_graphs(schedules: Sequence[Schedule], declared: Capabilities) -> list[Schedule]:
    """Schedules of a run that are captured: the first, and schedules of modes that are declared for graphs.

    With a slot for each node of a draft only the first schedule is captured: vLLM captures no step that is narrower
    than a draft.
    """
    first = schedules[0]
    others = [] if first.case.by_slots else schedules[1:]
    return [first, *(each for each in others if each.case.mode in declared.graph)]


def run_graphs(
    harness: ServerHarness,
    schedules: Sequence[Schedule],
    clock: Clock,
    options: RunOptions | None = None,
    *,
    co_resident: tuple[ServerHarness, Schedule] | None = None,
) -> GraphRun:
    """Capture all buckets of all schedules on one instance, then replay them interleaved, with eager steps between.

    Only schedules ``in_graphs`` are captured; steps of the others run eagerly after the replays, then replays again.

    ``co_resident``: a co-resident instance with its own pool, like a draft model next to its target, and its schedule.
    The co-resident instance captures graphs too, and plans and replays one whenever the tested instance is between
    planning and replaying its first schedule, and again before the replay's results are read. If
    ``instances_run_at_once`` is declared, it has its own memory pool, and another of its graphs runs on another stream
    at the same time as the replay.

    Eager steps run on the same instance, right after their replay; and a batch that is larger than any graph is run
    between replays. In half of the cases a small eager step comes before any capture, so that buffers which grow on
    demand still grow under the graphs. A mode that is not declared in eager mode has no eager steps.

    Raises ``RunError`` for whatever the backend raises.
    """
    evaluated, options = options is None, options or RunOptions()
    early = _before_graphs(harness, schedules[0], clock) if options.eager_steps else []
    pool = torch.cuda.graph_pool_handle()
    kept = KeptState(harness, options.restore_only) if options.restore_state else None
    captured = in_graphs(schedules, harness.capabilities)
    with clock.phase("setup"):
        gc.collect()  # a capture does it first, and what it frees is not the graphs'
    with harness.memory.kept("graphs"), harness.memory.peak("capture"):
        graphs = capture_schedules(
            harness, captured, pool, clock, _filled_with_step if options.step_at_capture else None
        )
    harness.captured()
    written = harness.written_at_capture()
    at_once = harness.capabilities.server.instances_run_at_once
    if at_once:
        pool = torch.cuda.graph_pool_handle()  # graphs of one pool may not run at once
    other = (
        CoResidentGraphs(capture_schedules(co_resident[0], [co_resident[1]], pool, clock)[0]) if co_resident else None
    )
    seen, replaced = _replay_all(graphs, other, clock, options, kept)
    if len(schedules) > 1:
        seen += _modes_by_turns(graphs, schedules, clock, options)
    memory: Mapping[str, int] = {}
    unbounded: tuple[Finding, ...] = ()
    if evaluated:
        last = last_live(graphs[0].schedule)
        again = partial(replay, graphs[0], last, Canaries([]), clock, options)
        memory, unbounded = memory_bounded(harness, clock, again)
    return GraphRun(
        # Findings of replays are reported first.
        observed=(*seen, *early),
        fill=graphs[0].fill,
        not_finite_in_warm_up=tuple(each.schedule for each in graphs if not each.warm_up_finite),
        uneven_warm_ups=tuple(where for each in graphs for where in each.uneven_warm_ups),
        written_at_capture=written,
        allocated_in_capture=tuple(AllocatedInCapture(a.path, a.where) for each in graphs for a in each.allocated),
        replaced=replaced,
        restored=kept.changed if kept else (),
        memory=memory,
        unbounded=unbounded,
    )


def replay_once(
    harness: ServerHarness, schedules: Sequence[Schedule], steps: Sequence[tuple[Schedule, Step]], clock: Clock
) -> list[Observation]:
    """Capture all buckets of ``schedules`` on an instance that has run eager steps, and replay ``steps`` once each.

    Raises ``RunError`` for whatever the backend raises.
    """
    graphs = capture_schedules(harness, schedules, torch.cuda.graph_pool_handle(), clock)
    of = {id(each.schedule): each for each in graphs}
    return [replay(of[id(each)], step, Canaries([]), clock, RunOptions()).observed for each, step in steps]


_Observed = list[tuple[Schedule, Observation]]


def _filled_with_step(graphs: ScheduleGraphs) -> None:
    staged = graphs.harness.load(graphs.schedule, graphs.schedule.steps[0])
    fill_static(graphs, staged)
    # It also fills the backend's own buffer of masks.
    view_of(graphs, staged)


def _before_graphs(harness: ServerHarness, schedule: Schedule, clock: Clock) -> _Observed:
    if not harness.case.derived("eager-before-graphs") or schedule.case.mode not in harness.capabilities.eager:
        return []
    short = min((step for step in schedule.steps if step.requests), key=lambda step: step.tokens)
    return [(schedule, run_eager(harness, schedule, short, clock, label="eager run before there are graphs"))]


def _replay_all(
    graphs: Sequence[ScheduleGraphs],
    other: CoResidentGraphs | None,
    clock: Clock,
    options: RunOptions,
    kept: KeptState | None,
) -> tuple[_Observed, tuple[str, ...]]:
    """Results of all replays and the eager steps between them, and attributes that their plans replaced."""
    seen: _Observed = []
    replaced: dict[str, None] = {}
    # Graphs may read these at any later replay.
    alive: list[torch.Tensor] = []
    with clock.phase("setup"):
        gc.collect()
        canaries = churn()
    for index in range(max(len(each.schedule.steps) for each in graphs)):
        for mine in graphs:
            schedule, first = mine.schedule, mine is graphs[0]
            if index >= len(schedule.steps):
                continue
            step = schedule.steps[index]
            if options.poison_allocated:
                _poison_allocated(graphs)
            declared = mine.harness.capabilities
            between = other.another_run if other and first else None
            if kept is not None:
                kept.restore()
                between = kept.between
            at_once = other.at_once if between and other and declared.server.instances_run_at_once else nullcontext
            replayed = replay(mine, step, canaries, clock, options, between, at_once)
            replaced.update(dict.fromkeys(replayed.replaced))
            alive += replayed.copied_into
            observed = replayed.observed
            # Large batches between replays: an eager step may need more room than any graph.
            oversized = index == _OVERSIZED_AFTER and first and schedule.case.mode in declared.eager
            if options.eager_steps and (schedule.runs_eagerly(step, declared) or oversized):
                eager = _eager_after(mine, schedule.oversized if oversized else step, observed, clock, options)
                with clock.phase("setup"):
                    # The eager step may have freed what a graph still uses.
                    canaries.blocks += churn().blocks
                seen.append((schedule, eager))
                observed = replace(observed, eager_run=None if oversized else eager)
            seen.append((schedule, observed))
    return seen, tuple(replaced)


def _modes_by_turns(
    graphs: Sequence[ScheduleGraphs], schedules: Sequence[Schedule], clock: Clock, options: RunOptions
) -> _Observed:
    """Run the last step of each mode again: eager steps of all modes, then replays of all, then the eager ones again.

    Every plan is then made for the lengths of the same mode's last plan, with plans of other modes in between, and the
    first eager plan for the lengths of the last eager one, with replays in between (TensorRT-LLM #13696).
    """
    harness, what = graphs[0].harness, what_alternates(graphs[0].harness)
    supported = [each for each in schedules if each.case.mode in harness.capabilities.eager]
    eager = [(each, last_live(each)) for each in supported]
    with clock.phase("setup"):
        canaries = churn()
    before = eager_by_turns(harness, eager, clock, ("after all replays",))
    replays = []
    for each in reversed(graphs):
        again = replay(each, last_live(each.schedule), canaries, clock, options).observed
        replays.append(replace(again, label=f"{again.label}, again, {what} in turn"))
    # The last of the eager plans first: only replays were planned since, the last of another mode.
    after = eager_by_turns(harness, eager[::-1], clock, (f"after replays of all {what}",))
    return [(seen.schedule, seen) for seen in (*before, *replays, *after)]


def last_live(schedule: Schedule) -> Step:
    """The last step that has requests."""
    return next(step for step in reversed(schedule.steps) if step.requests)


def _eager_after(
    graphs: ScheduleGraphs, step: Step, replayed: Observation, clock: Clock, options: RunOptions
) -> Observation:
    """Run an eager step on the instance right after a replay: the same step, or a larger batch."""
    which = "" if step is replayed.step else f" ({step.label}, {step.bs} requests)"
    label = f"eager run{which} after {replayed.label}"
    return run_eager(
        graphs.harness, graphs.schedule, step, clock, pattern=options.pattern, label=label, ran_before="graphs"
    )


def _poison_allocated(graphs: Sequence[ScheduleGraphs]) -> None:
    """Poison memory that was allocated in a capture: its graph must write it before it reads it."""
    for each in graphs:
        for allocated in each.allocated:
            tensor = allocated.tensor()
            if tensor is not None:
                fill_with_poison(tensor)
