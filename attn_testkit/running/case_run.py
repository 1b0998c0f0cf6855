"""Running one case on one backend and judging what it did. Knows no pytest and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..cases.case import Case
from ..cases.catalogue import companions
from ..cases.schedule import Schedule, Step, make_schedule, only
from ..checks import Judgement, Stage
from ..checks.claims import refuses_undeclared
from ..checks.failures import context_lost, from_exception
from ..checks.observation import Observation
from ..checks.sameness import batch_invariant, repeatable
from ..checks.step import judge_step
from ..contract import AttentionBackend, Capabilities, Execution, Unsupported
from ..environment import Environment, missing_here
from ..oracle.expect import expect
from ..results import Finding
from ..runner_modes.asked import DriveError, kernels_of
from ..runner_modes.drive import Clock, GraphDrive, drive_graphs, run_eager
from ..runner_modes.world import World

__all__ = ["Outcome", "gradients_off", "run_case", "schedule_for"]


@dataclass
class Outcome:
    """What a case-run found, before it becomes a result."""

    findings: list[Finding] = field(default_factory=list)
    stage: Stage = Stage.STARTED
    margin: float | None = None
    clock: Clock = field(default_factory=Clock)
    kernels: str = "real"
    lost: str = ""
    """Why the device context is gone; empty when it is not."""
    failed_steps: dict[str, list[tuple[Schedule, Observation]]] = field(default_factory=dict)
    """Check -> steps that failed it, for diagnosis."""
    warm_up: list[Finding] = field(default_factory=list)
    """What is wrong with the warm-ups before captures."""
    passed_steps: list[tuple[Schedule, Observation]] = field(default_factory=list)


@contextmanager
def gradients_off(case: Case) -> Iterator[None]:
    """``no_grad`` in half of the cases, ``inference_mode`` in the others: servers use both."""
    with torch.inference_mode() if case.inference_mode else torch.no_grad():
        yield


def run_case(
    backend_class: type[AttentionBackend], case: Case, execution: Execution, environment: Environment
) -> Outcome:
    """Drive a backend through one case. Whatever it raises becomes a finding; nothing of the backend's escapes."""
    outcome = Outcome()
    claims = backend_class.capabilities
    run = _run_graph if execution is Execution.GRAPH else _run_eager
    try:
        with environment.active(), gradients_off(case):
            seen = run(backend_class, case, environment, outcome)
    except DriveError as error:
        cause = error.__cause__
        assert cause is not None
        outcome.stage = _STAGE_OF.get(error.phase, Stage.CONSTRUCTED)
        _record_exception(outcome, cause, error.phase, error.label, claims.needs_cpu_seq_lens)
        cause.__traceback__ = None
        return outcome
    with outcome.clock.phase("oracle and checks"):
        for schedule, observed in seen:
            _judge_into(outcome, schedule, observed, claims)
    outcome.stage = Stage.COMPLETED
    # What is wrong at a replay as well is told there, with a place.
    outcome.findings += [] if outcome.failed_steps else outcome.warm_up
    return outcome


_STAGE_OF = {
    "constructor": Stage.STARTED,
    "kernels": Stage.STARTED,
    "plan for replay": Stage.CAPTURED,
    "replay": Stage.CAPTURED,
}
"""Phase that raised -> how far the case-run had come. What was observed before it is not judged."""


def _record_exception(outcome: Outcome, error: BaseException, phase: str, label: str, needs_cpu: bool) -> None:
    if context_lost(error):
        outcome.lost = str(error).splitlines()[0]
    outcome.findings.append(from_exception(error, phase, label, needs_cpu_lengths=needs_cpu))


def _judge_into(outcome: Outcome, schedule: Schedule, observed: Observation, claims: Capabilities) -> None:
    judgement = Judgement(observed, expect(schedule, observed.step))
    found = judge_step(judgement, schedule, claims)
    outcome.margin = max(outcome.margin or 0.0, min(judgement.margin, 1e9))
    if found:
        for finding in found:
            outcome.failed_steps.setdefault(finding.check, []).append((schedule, observed))
    else:
        outcome.passed_steps.append((schedule, observed))
    outcome.findings += found


def build_world(
    backend_class: type[AttentionBackend], schedules: list[Schedule], environment: Environment, outcome: Outcome
) -> World:
    """Construct everything; a constructor that raises is a finding, ``Unsupported`` for a claimed case included."""
    with outcome.clock.phase("setup"):
        try:
            world = World(backend_class, schedules, environment.device)
        except Unsupported as error:
            refused = RuntimeError(f"refused a claimed case: Unsupported: {error}")
            raise DriveError("constructor", "") from refused
        except Exception as error:
            raise DriveError("constructor", "") from error
    outcome.kernels = kernels_of(world.backend)
    return world


_Seen = list[tuple[Schedule, Observation]]


def schedule_for(case: Case, claims: Capabilities) -> Schedule:
    """One object for all backends with the same limits, so that they share the oracle's answers."""
    if case.kv_dtype == "same" or claims.matmul_dtype == "model":
        return make_schedule(case)
    return make_schedule(case, claims.matmul_dtype)


def _run_eager(backend_class: type[AttentionBackend], case: Case, environment: Environment, outcome: Outcome) -> _Seen:
    claims = backend_class.capabilities
    schedule = schedule_for(case, claims)
    world = build_world(backend_class, [schedule], environment, outcome)
    step, second = schedule.steps[0], schedule.second
    observed = run_eager(world, schedule, step, outcome.clock)
    # Right after it, and not after another step: what alternates from step to step would have come round again.
    again = run_eager(world, schedule, step, outcome.clock, label="the same eager step again", among="steps")
    if claims.deterministic:
        outcome.findings += repeatable(observed, again)
    stored = ", save_kv_cache=False" if second.stored else ""
    label = f"another eager step on the instance ({second.label}{stored})"
    other = run_eager(world, schedule, second, outcome.clock, label=label, among="steps")
    if claims.batch_invariant and step.bs > 1:
        index = _request_to_isolate(case, step)
        alone = run_eager(world, schedule, only(step, index), outcome.clock)
        outcome.findings += batch_invariant(observed, alone, index)
    with outcome.clock.phase("setup"):
        outcome.findings += refuses_undeclared(backend_class, schedule, world.context)
    return [(schedule, observed), (schedule, again), (schedule, other)]


def _request_to_isolate(case: Case, step: Step) -> int:
    """Mostly the second longest: long enough to be split, and not the one whose length sets the batch's maximum."""
    by_length = sorted(range(step.bs), key=lambda i: -len(step.requests[i].slots))
    return by_length[1] if case.digest & 12 else case.digest % step.bs


def _run_graph(backend_class: type[AttentionBackend], case: Case, environment: Environment, outcome: Outcome) -> _Seen:
    claims = backend_class.capabilities
    cases = [case]
    if case.mixed:
        runnable = {mode for mode in claims.graph if not missing_here(claims, environment, mode)}
        max_topk = claims.max_topk if claims.window_in_trees or case.window < 0 else 1
        cases += companions(case, runnable, claims.max_q_rows, max_topk)
    schedules = [schedule_for(c, claims) for c in cases]
    world = build_world(backend_class, schedules, environment, outcome)
    neighbour = build_world(backend_class, schedules[:1], environment, outcome) if case.mixed else None
    seen, drives = drive_graphs(world, schedules, outcome.clock, neighbour=neighbour)
    outcome.warm_up = [finding for drive in drives for finding in _warm_up_finite(drive)]
    return seen


def _warm_up_finite(drive: GraphDrive) -> list[Finding]:
    """Capture runs on real kernels: a decode or verify of one key must not give NaN (servers assert it)."""
    if drive.fill < 1 or drive.schedule.case.new or drive.warm_is_finite:
        return []
    return [
        Finding(
            "finite",
            "the warm-up before capture gives NaN or Inf",
            where=f"bucket {drive.schedule.buckets[-1]}, every seq_lens at the fill value {drive.fill}",
            hint="capture metadata do not hold seq_lens (zero keys give 0 / 0), or rows of one key are never written",
        )
    ]
