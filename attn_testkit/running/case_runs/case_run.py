"""The worker's part of a case-run: run one case on one backend. Inputs come from the case, and the worker sends host
copies."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ...cases.case import Case, parse_case
from ...cases.co_residents import co_resident_of, declared_co_residents
from ...cases.features.server.table import on_its_instance, variant_of
from ...checks import Stage
from ...checks.capabilities import refuses_undeclared
from ...checks.failures import LOST_HINT, context_lost, first_line, from_exception, is_ctrl_c
from ...checks.lossless import GeneratedTokens
from ...checks.observation import Observation
from ...contract import AttentionBackend, Capabilities, Execution, ForwardMode, Unsupported
from ...environment import Environment, compiled_regions_run, launch_grids, missing_here
from ...graphs.compilers import make_room, room_left
from ...results.finding import Finding
from ...results.names import NO_ROOM, NOT_COMPILED
from ...runner_modes.clock import Clock
from ...runner_modes.co_resident import EagerCoResident
from ...runner_modes.compiling import compiles_once
from ...runner_modes.eager import eager_by_turns, run_eager
from ...runner_modes.errors import NoRoomError, RunError, out_of_memory
from ...runner_modes.graphs import GraphRun, replay_once, run_graphs
from ...runner_modes.greedy_loop import run_loop
from ...runner_modes.harness import ServerHarness, what_alternates
from ...runner_modes.hook_answers import kernels_of
from ...runner_modes.memory_bounded import memory_bounded
from ...runner_modes.messages import Rerun, RunCase, RunRecord, StepRecord
from ...runner_modes.pool_address import pools_anywhere
from ...runner_modes.two_batches import TwoBatches
from ...runner_modes.verify_loop import run_verify_loop
from ...steps.data import DTYPES
from ...steps.greedy_loop import Loop, loop_modes, make_loop
from ...steps.kv_groups import pages_in_pool
from ...steps.last_rows import captured_for_bits, last_rows_of, replayed_for_bits
from ...steps.numerics import numerics_of
from ...steps.schedule import Schedule, Step, make_schedule, only, part
from ...steps.verify_loop import VerifyLoop, make_verify_loop, verify_loop_runs
from ..planning.request import Item
from ..processes.device_memory import filled_by_others
from ..processes.memory_limit import no_more_than
from .diagnosed import Diagnosed


@dataclass(frozen=True)
class CaseRun:
    """An item of a plan with its case, which is parsed once."""

    item: Item
    case: Case
    execution: Execution
    diagnosed: Diagnosed | None = None
    """Earlier failures: a failure that is like one of them is not diagnosed. None: each failure is diagnosed."""
    diagnose_s: float | None = None
    """Seconds after which the diagnosis starts no further run; None: no limit."""


@contextmanager
def gradients_off(case: Case) -> Iterator[None]:
    """``no_grad`` in half of the cases, ``inference_mode`` in the others: servers use both."""
    with torch.inference_mode() if case.inference_mode else torch.no_grad():
        yield


def schedule_for(case: Case, declared: Capabilities) -> Schedule:
    """One object for all backends with the same limits, so that they share the oracle's answers."""
    return make_schedule(case, numerics_of(case, declared))


def schedules_of(case: Case, execution: Execution, declared: Capabilities, environment: Environment) -> list[Schedule]:
    """Schedules that a case-run runs on one instance: the case's own and, in multi-mode cases, those of other modes."""
    cases = [case]
    if case.multi_mode:
        captured = declared.graph if execution is Execution.GRAPH and not case.by_slots else frozenset()
        supported = declared.eager | captured
        runnable = {mode for mode in supported if not missing_here(declared, environment, mode)}
        cases += declared_co_residents(declared, case, runnable)
    cases += on_its_instance(case)
    own = [schedule_for(each, declared) for each in cases]
    if execution is Execution.EAGER:
        here = {mode for mode in declared.eager | declared.graph if not missing_here(declared, environment, mode)}
        own += [each for each in last_rows_of(own[0], declared) if each.case.mode in here]
    return own


def request_to_isolate(case: Case, step: Step) -> int:
    """The request to run by itself, mostly the second longest: it is long enough to be split, but its length is not the
    batch's maximum."""
    by_length = sorted(_with_rows(step), key=lambda i: -len(step.requests[i].slots))
    return (by_length[:2][-1], by_length[-1], min(by_length), max(by_length))[case.derived("isolated-request")]


def _with_rows(step: Step) -> list[int]:
    return [index for index, request in enumerate(step.requests) if request.new]


def with_other_requests(case: Case, step: Step) -> list[Step]:
    """Steps that repeat each request that has rows: one request by itself, the others in groups of two, four, eight and
    so on. So most requests run on both sides of the batch size at which a backend changes its path (pegainfer #623:
    more than 32).
    """
    alone = request_to_isolate(case, step)
    others, parts = [index for index in _with_rows(step) if index != alone], [only(step, alone)]
    while others:
        most = 1 << len(parts)
        parts.append(part(step, others[:most]))
        others = others[most:]
    return parts


@dataclass
class _CaseRun:
    """Record of a case-run so far, kept outside the code that runs it so that an exception does not lose it."""

    schedules: Sequence[Schedule]
    declared: Capabilities
    stage: Stage = Stage.STARTED
    clock: Clock = field(default_factory=Clock)
    kernels: str = "real"
    findings: list[Finding] = field(default_factory=list)
    observed: list[Observation] = field(default_factory=list)

    def deliver(self, observed: Observation) -> Observation:
        """Record a step that is over."""
        self.observed.append(observed)
        self.stage = max(self.stage, Stage.REPLAYED if observed.replay else Stage.OBSERVED)
        return observed

    def captured(self) -> None:
        """All graphs are captured."""
        self.stage = max(self.stage, Stage.CAPTURED)

    def records(self, observed: Sequence[Observation]) -> tuple[StepRecord, ...]:
        """The parts of observations that are sent to the lane."""
        numbers = {id(each.copies): number for number, each in enumerate(observed)}
        return tuple(
            StepRecord(
                schedule=next(i for i, schedule in enumerate(self.schedules) if schedule is each.schedule),
                step=each.step.name,
                copies=each.copies,
                label=each.label,
                ran_before=each.ran_before,
                damaged=each.damaged,
                replay=each.replay,
                padded=each.padded,
                eager_run=None if each.eager_run is None else numbers[id(each.eager_run.copies)],
            )
            for each in observed
        )


def run_case(
    backend_class: type[AttentionBackend], request: RunCase, environment: Environment, declared: Capabilities
) -> RunRecord:
    """Run one case on a backend. An exception of the backend becomes a finding and never escapes.

    ``declared``: the capabilities that the judge knows, even if the class declares others now.
    """
    case = parse_case(request.case)
    schedules = schedules_of(case, request.execution, declared, environment)
    drive = _CaseRun(schedules, declared)
    run = _run_graph if request.execution is Execution.GRAPH else _run_eager
    lost = ""
    record = RunRecord()
    make_room()
    compiled = compiled_regions_run()
    # Eager runs and graphs take the two orders, so that a result which depends on the order shows.
    in_graph = request.execution is Execution.GRAPH
    try:
        with environment.active(last_first=in_graph), gradients_off(case), _room_for(schedules[0], environment):
            before = _gradient_modes()
            record = run(backend_class, drive, environment)
            record = replace(record, generated=_loop(backend_class, drive, request.execution, environment))
            if _gradient_modes() != before:
                # The block ends the modes; a server has no such block around a backend.
                record = replace(record, changed=(f"the grad mode: {before} -> {_gradient_modes()}",))
    except NoRoomError as error:
        return RunRecord(not_here=str(error))
    except RunError as error:
        cause = error.__cause__
        assert cause is not None
        if (large := _large_memory(case)) and out_of_memory(cause):
            return RunRecord(not_here=f"{NO_ROOM}{large}: {first_line(cause)}")
        if full := filled_by_others(cause):
            return RunRecord(not_here=full)
        lost = _lost_context(cause, environment)
        # Of a way something else may be None.
        needs = declared.needs.cpu_seq_lens or variant_of(case).gives_none
        found = from_exception(cause, error.phase, error.label, needs_cpu_lengths=needs)
        if lost and not context_lost(cause):
            found = replace(found, hint=f"{LOST_HINT} ({lost})")
        if room_left() <= 0:
            found = replace(found, hint="\n".join(filter(None, (found.hint, _GIVEN_UP))))
        drive.findings.append(found)
        cause.__traceback__ = None
    else:
        drive.stage = Stage.COMPLETED
    return replace(
        record,
        findings=tuple(drive.findings),
        stage=int(drive.stage),
        lost=lost,
        seconds=drive.clock.seconds,
        kernels=NOT_COMPILED if drive.kernels == "real" and compiled_regions_run() > compiled else drive.kernels,
        records=record.records if drive.stage is Stage.COMPLETED else drive.records(drive.observed),
    )


def _lost_context(error: BaseException, environment: Environment) -> str:
    """The reason why the device is unusable for the rest of the process; empty if it is usable.

    After an illegal access, a library may only report that it could not start: ``cublasCreate`` gives
    CUBLAS_STATUS_INTERNAL_ERROR. So the device is asked.
    """
    if context_lost(error):
        return first_line(error)
    if environment.emulated:
        return ""
    try:
        torch.cuda.synchronize(environment.index)
    except RuntimeError as later:
        return first_line(later) if context_lost(later) else ""
    return ""


_GIVEN_UP = (
    "torch.compile runs a function uncompiled, because the function was recompiled more often than "
    "torch._dynamo.config.recompile_limit allows; TORCH_LOGS=recompiles shows the reasons"
)
_INDEX_BYTES = 132
"""Bytes of an index key and its scale."""
_BESIDE_A_BIG_POOL = 3 << 30
"""Bytes. Under emulated CUDA a KV pool that is mostly unused only reserves address space. A backend that copies the
pool is correct but slow, and uses all of that memory."""
_BESIDE_WIDE_SCORES = 2 << 30
"""A limit in bytes, below what scores of all columns need: a kernel that is interpreted tile by tile would run for
hours. A backend that stores only columns of keys stays below it."""


def _has_many_states(case: Case) -> bool:
    return case.state is not None and case.state.big


def _large_memory(case: Case) -> str:
    """Name of what may not fit into memory in a case, or empty text."""
    if variant_of(case).pool_elements:
        return "in addition to a KV pool of more than 2^31 elements"
    if _has_many_states(case):
        return "in addition to a pool of states of more than 2^31 elements"
    return "for scores of more than 2^31 bytes and what is computed from them" if "wide_scores" in case.variants else ""


def _room_for(schedule: Schedule, environment: Environment) -> contextlib.AbstractContextManager[None]:
    wide = "wide_scores" in schedule.case.variants and bool(schedule.case.new)
    if not environment.emulated or not (wide or variant_of(schedule.case).pool_elements):
        return contextlib.nullcontext()
    # Memory of an earlier case's pool must not count as room for a copy of this one.
    gc.collect()
    if wide:
        return no_more_than(_BESIDE_WIDE_SCORES)
    case, (_, heads, width) = schedule.case, schedule.case.head_shape
    parts, size = case.heads.layout.pool_rows, DTYPES[case.dtype].itemsize
    pool = case.layers.count * parts * (pages_in_pool(schedule) + 1) * case.page_size * heads * width * size
    index = _INDEX_BYTES * (pages_in_pool(schedule) + 1) * case.page_size if case.indexer else 0
    return no_more_than(pool + index + _BESIDE_A_BIG_POOL)


def _gradient_modes() -> str:
    inference = "inference_mode" if torch.is_inference_mode_enabled() else "no inference_mode"
    return f"grad {'on' if torch.is_grad_enabled() else 'off'}, {inference}"


def _build(backend_class: type[AttentionBackend], drive: _CaseRun, environment: Environment) -> ServerHarness:
    """Construct everything; a constructor that raises is a finding, ``Unsupported`` for a declared case included."""
    with drive.clock.phase("setup"):
        harness = _constructed(backend_class, drive.schedules, environment, drive.declared)
    harness.deliver, harness.captured = drive.deliver, drive.captured
    drive.stage = max(drive.stage, Stage.CONSTRUCTED)
    drive.kernels = kernels_of(harness.backend)
    return harness


def _constructed(
    backend_class: type[AttentionBackend],
    schedules: Sequence[Schedule],
    environment: Environment,
    declared: Capabilities,
) -> ServerHarness:
    try:
        return ServerHarness(backend_class, schedules, environment.device, declared=declared)
    except Unsupported as error:
        refused = RuntimeError(f"refused a declared case: Unsupported: {error}")
        raise RunError("constructor", "") from refused
    except (RunError, NoRoomError):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise RunError("constructor", "") from error


def _run_eager(backend_class: type[AttentionBackend], drive: _CaseRun, environment: Environment) -> RunRecord:
    schedule, declared = drive.schedules[0], drive.declared
    case = schedule.case
    harness = _build(backend_class, drive, environment)
    step, second = schedule.steps[0], schedule.second
    beside = _co_resident(backend_class, drive, environment)
    between = EagerCoResident(*beside).another_run if beside else None
    seen = [run_eager(harness, schedule, step, drive.clock, ran_before="instances" if beside else "", between=between)]
    # Right after it, not after another step: state that alternates from step to step would have its first value again.
    seen.append(run_eager(harness, schedule, step, drive.clock, label="the same eager step again", ran_before="steps"))
    grows = harness.memory.grown > 0
    # A chunk's prefix is what the chunk before it wrote.
    seen += [
        run_eager(harness, schedule, chunk, drive.clock, label=f"{chunk.label}, eager", ran_before="steps")
        for chunk in schedule.chunks
    ]
    if declared.server.takes_empty_batches:
        seen += [
            run_eager(harness, schedule, idle, drive.clock, label=f"{idle.label}, eager", ran_before="steps")
            for idle in schedule.idle
        ]
    label = f"another eager step on the instance ({', '.join((second.label, *second.own_variations))})"
    seen.append(run_eager(harness, schedule, second, drive.clock, label=label, ran_before="steps"))
    if declared.promises.batch_invariant and step.bs > 1:
        seen += [
            run_eager(harness, schedule, few, drive.clock, label=few.label) for few in with_other_requests(case, step)
        ]
    own = [(each, each.steps[0]) for each in drive.schedules if each.case.mode in declared.eager]
    if len(own) > 1:
        what = what_alternates(harness)
        seen += eager_by_turns(harness, own, drive.clock, (f"{what} in turn", f"{what} in turn, again"))
    drive.findings += compiles_once(harness, schedule, drive.clock)
    memory: Mapping[str, int] = dict(harness.memory.facts)
    if grows:
        memory, unbounded = memory_bounded(
            harness, drive.clock, partial(run_eager, harness, schedule, step, drive.clock)
        )
        drive.findings += unbounded
    captured = captured_for_bits(drive.schedules, declared)
    if captured:
        steps = [(each, step) for each in captured for step in replayed_for_bits(each)]
        seen += replay_once(harness, captured, steps, drive.clock)
    with drive.clock.phase("setup"):
        drive.findings += refuses_undeclared(backend_class, schedule, harness.context, declared)
    return RunRecord(records=drive.records(seen), memory=memory)


def _run_graph(backend_class: type[AttentionBackend], drive: _CaseRun, environment: Environment) -> RunRecord:
    harness = _build(backend_class, drive, environment)
    co_resident = _co_resident(backend_class, drive, environment)
    run = run_graphs(harness, drive.schedules, drive.clock, co_resident=co_resident)
    if not drive.declared.eager:
        with drive.clock.phase("setup"):
            drive.findings += refuses_undeclared(backend_class, drive.schedules[0], harness.context, drive.declared)
    drive.findings += run.unbounded
    return replace(_found(run, drive.schedules), records=drive.records([observed for _, observed in run.observed]))


def _co_resident(
    backend_class: type[AttentionBackend], drive: _CaseRun, environment: Environment
) -> tuple[ServerHarness, Schedule] | None:
    """Make the co-resident instance of a multi-mode case and its schedule."""
    case = drive.schedules[0].case
    if not case.multi_mode:
        return None
    schedule = schedule_for(co_resident_of(drive.declared, case), drive.declared)
    return _constructed(backend_class, [schedule], environment, drive.declared), schedule


def loop_of(case: Case, execution: Execution, declared: Capabilities, environment: Environment) -> Loop | None:
    """The greedy-equivalence loop of a case; None if it has none."""

    def here(modes: Set[ForwardMode]) -> set[ForwardMode]:
        return {mode for mode in modes if not missing_here(declared, environment, mode)}

    supported = here(declared.graph if execution is Execution.GRAPH else declared.eager)
    if verify_loop_runs(case, supported, here(declared.eager)):
        return make_verify_loop(case)
    modes = loop_modes(case, supported)
    return make_loop(case, modes) if modes else None


def _loop(
    backend_class: type[AttentionBackend], drive: _CaseRun, execution: Execution, environment: Environment
) -> GeneratedTokens | None:
    case = drive.schedules[0].case
    loop = loop_of(case, execution, drive.declared, environment)
    if loop is None:
        return None
    harness = _constructed(backend_class, loop.schedules, environment, drive.declared)
    if isinstance(loop, VerifyLoop):
        return run_verify_loop(harness, case, loop, drive.clock, in_graphs=execution is Execution.GRAPH)
    return run_loop(harness, case, loop, drive.clock, in_graphs=execution is Execution.GRAPH)


def _found(run: GraphRun, schedules: Sequence[Schedule]) -> RunRecord:
    """Findings of a graph run that belong to no step."""
    warm = tuple(i for i, s in enumerate(schedules) if any(s is each for each in run.not_finite_in_warm_up))
    return RunRecord(
        fill=run.fill,
        not_finite_in_warm_up=warm,
        uneven_warm_ups=run.uneven_warm_ups,
        written_at_capture=run.written_at_capture,
        allocated_in_capture=tuple((each.path, each.where) for each in run.allocated_in_capture),
        replaced=run.replaced,
        restored=run.restored,
        memory=run.memory,
    )


def rerun(
    backend_class: type[AttentionBackend], request: Rerun, environment: Environment, declared: Capabilities
) -> RunRecord:
    """Answer a question of the diagnosis on a fresh instance. If the instance raises, there are no records, and the
    answer counts as wrong."""
    schedule = request.schedule
    if request.options.width_at_capture:
        declared = declared.with_changes(server={"takes_unset_width": False})
    if request.options.contiguous_heads:
        declared = declared.with_changes(server={"takes_strided_heads": False})
    drive = _CaseRun([schedule], declared)
    unowned = {} if request.unowned is None else {"unowned": request.unowned}
    try:
        last_first = request.step is None and not request.options.programs_in_order
        with (
            environment.active(request.fill, controlled=True, last_first=last_first),
            launch_grids(request.options.most_programs) as grids,
            gradients_off(schedule.case),
            pools_anywhere(request.options.pools_anywhere),
        ):
            harness = ServerHarness(
                backend_class, [schedule], environment.device, fill=request.fill, declared=declared, **unowned
            )
            harness.deliver, harness.copies_pool = drive.deliver, False
            if isinstance(harness.backend, TwoBatches):
                harness.backend.uncut = request.options.uncut
            harness.waits_before_plans = request.options.wait_before_plans
            if request.options.nothing_behind:
                harness.model.rows_behind = 0
            if request.step is not None:
                pattern = request.options.pattern
                seen = [run_eager(harness, schedule, request.step, drive.clock, pattern=pattern)]
                found = RunRecord()
            else:
                run = run_graphs(harness, [schedule], drive.clock, request.options)
                seen = [observed for _, observed in run.observed]
                found = _found(run, [schedule])
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        cause = error.__cause__ if isinstance(error, RunError) and error.__cause__ else error
        return RunRecord(lost=_lost_context(cause, environment))
    kinds = tuple(dict.fromkeys(grids))
    return replace(found, records=drive.records(seen), stage=int(Stage.COMPLETED), grids=kinds)
