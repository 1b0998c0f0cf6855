"""Evaluation of a case-run: steps come as host copies, expected values are computed here."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ...cases.case import Case
from ...cases.declared import not_declared
from ...cases.features.server.table import dialect_of, variant_of
from ...checks import NUMERIC, Comparison, Stage, evaluated
from ...checks.graphs import at_capture
from ...checks.loop_mistakes import mistake_in
from ...checks.lossless import lossless, ran_to_its_end
from ...checks.observation import Observation, StepInputs
from ...checks.sameness import batch_invariant, mode_invariant, repeatable
from ...checks.state_rounding import rounds_anew
from ...checks.states import state_margin
from ...checks.step import evaluate_step
from ...contract import Capabilities, Execution, ForwardMode
from ...diagnosis.raised import explain_freed, explain_raised
from ...diagnosis.rerun import Rerunner, TimeUp
from ...diagnosis.root_cause import explain_numeric, name_check
from ...diagnosis.strided_heads import blame_strided_heads
from ...diagnosis.unset_width import WIDTH_OF, blame_unset_width
from ...environment import Environment, planned
from ...families.by_layer import data_of_texts, make_data, schedule_of
from ...families.expected import expect, expect_of
from ...families.table import families_of, family_of
from ...model import pack
from ...results.case_result import UNDECLARED_GRAPH, CaseResult, Status
from ...results.finding import Finding
from ...results.texts import NOTE_ON_THE_CASE
from ...runner_modes.graphs import in_graphs, last_live
from ...runner_modes.messages import Described, Rerun, RunCase, RunRecord, StepRecord
from ...steps.data import StepData
from ...steps.last_rows import LAST_ROWS, captured_for_bits, replayed_for_bits
from ...steps.schedule import Schedule, Step
from ..planning.request import Item, Plan, bare_result
from ..processes.worker_process import WorkerLost
from .case_run import CaseRun, loop_of, schedule_for, schedules_of, with_other_requests
from .diagnosed import First

Run = Callable[[RunCase | Rerun], RunRecord]
"""Function that lets a worker run something. May raise ``WorkerLost``."""


@dataclass
class _Outcome:
    """Findings and evaluated checks of a case-run before it becomes a result."""

    record: RunRecord
    observed: list[Observation] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    margin: float | None = None
    failed: dict[str, list[Observation]] = field(default_factory=dict)
    """Check -> steps that failed it, for the diagnosis."""
    passed: list[Observation] = field(default_factory=list)
    not_compared: tuple[str, ...] = ()
    """Bitwise checks that had nothing to compare with."""


def evaluate_item(drive: Run, described: Described, plan: Plan, asked: CaseRun) -> CaseResult:
    """Let one case run, evaluate it, and ask for reruns if numbers are wrong. Raises what ``drive`` raises."""
    item, case, execution = asked.item, asked.case, asked.execution
    environment = planned(plan.device, plan.header.device)
    outcome, seconds = _evaluated(drive, described, case, execution, environment)
    result = partial(_result, item, plan, described.declared, case, execution, outcome, seconds)
    if outcome.record.not_here:
        return bare_result(item, Status.NOT_RUN_HERE, outcome.record.not_here)
    if outcome.record.lost:
        return result(Status.CRASHED, outcome.record.lost)
    if outcome.findings:
        started, first = time.perf_counter(), outcome.findings[0]
        outcome.findings, like, done = _diagnosed(drive, described, plan, asked, outcome, environment)
        seconds["diagnosis"] = time.perf_counter() - started
        return replace(
            result(Status.FAILED), like=like, diagnosed=done, failed_mode=_mode_of_failure(outcome, first, case)
        )
    passed = result(Status.PASSED)
    if item.probe:
        probed, _ = _evaluated(drive, described, case, Execution.GRAPH, environment)
        if not probed.findings and not probed.record.lost:
            hint = UNDECLARED_GRAPH.format(backend=item.backend, mode=item.mode)
            return replace(passed, hints=(*passed.hints, hint))
    return passed


def _diagnosed(
    drive: Run,
    described: Described,
    plan: Plan,
    asked: CaseRun,
    outcome: _Outcome,
    environment: Environment,
) -> tuple[list[Finding], str, bool]:
    """Findings with hints about their cause, if the plan asks for these; the earlier failure that they are like, if
    any; and True if the kit looked for their cause.
    """
    declared, case, execution, diagnosed = described.declared, asked.case, asked.execution, asked.diagnosed
    found, place = outcome.findings[0], (asked.item.backend, asked.case, asked.execution)
    explains, like = plan.explains, None
    if explains == "cause" and diagnosed is not None:
        more = diagnosed.tells_more(*place, found)
        like = diagnosed.like(*place, found)
        if like and not more:
            explains = "check" if asked.item.known else "nothing"
    if explains == "nothing":
        explained = _alike(outcome, like) if like else list(_first_of_each_check(outcome.findings).values())
    else:
        rerunner = Rerunner(
            _unless_lost(drive),
            environment,
            declared.eager,
            lambda case: not not_declared(declared, case),
            asked.diagnose_s,
        )
        explained = _explained(outcome, rerunner, cause=explains == "cause")
        if explains == "cause":
            rerunner.may_be_cut = True
            with contextlib.suppress(TimeUp):
                explained[0] = _with_cause(explained[0], outcome, rerunner, declared, case, execution)
            if rerunner.was_cut:
                explained[0] = _with_hint_after(explained[0], _CUT.format(asked.diagnose_s))
            if diagnosed is not None:
                diagnosed.note(*place, found, explained[0])
    findings = [_of_variant(finding, case) for finding in explained]
    return findings, like.name if like else "", explains == "cause"


def _mode_of_failure(outcome: _Outcome, first: Finding, case: Case) -> str:
    """The mode of the step of ``first``, the first finding, if it is not the mode of the case."""
    steps = outcome.failed.get(first.check, [])
    if steps:
        mode = steps[0].schedule.case.mode.value
    else:
        # An exception has no observation; labels of steps that share an instance name the mode.
        found = _LABEL_OF_MODE.search(first.step)
        mode = found[1] or found[2] if found else ""
    return mode if mode != case.mode.value else ""


_MODES = "|".join(sorted((mode.value for mode in ForwardMode), key=len, reverse=True))
_LABEL_OF_MODE = re.compile(rf"^eager ({_MODES}),|bucket \d+ of ({_MODES})(?=,|$)")


def _alike(outcome: _Outcome, like: First) -> list[Finding]:
    """Findings without a diagnosis: wrong numbers appear once, under the check of the failure that they are like."""
    explained: list[Finding] = []
    for check, finding in _first_of_each_check(outcome.findings).items():
        if check not in NUMERIC:
            explained.append(finding)
        elif not any(each.check == like.check or each.check in NUMERIC for each in explained):
            steps = outcome.failed.get(check, [])
            explained.append(_with_other_steps(replace(finding, check=like.check), [seen.label for seen in steps]))
    return explained


def _with_cause(
    finding: Finding, outcome: _Outcome, rerunner: Rerunner, declared: Capabilities, case: Case, execution: Execution
) -> Finding:
    """Add hints about outputs other than attention."""
    in_graph = execution is Execution.GRAPH
    if in_graph:
        finding = _of_unset_width(finding, rerunner, case, declared)
    if finding.check in _OF_STRIDES and declared.server.takes_strided_heads and case.strided_heads:
        finding = _with_hint(finding, blame_strided_heads(rerunner, schedule_for(case, declared)))
    if finding.check == "completes" and outcome.record.stage < Stage.COMPLETED:
        finding = _with_hint(finding, explain_raised(rerunner, schedule_for(case, declared), in_graph=in_graph))
    if finding.check == "addresses-stable" and outcome.record.stage < Stage.COMPLETED:
        finding = _with_hint(finding, explain_freed(rerunner, schedule_for(case, declared)))
    return finding


_OF_STRIDES = frozenset({*NUMERIC, "completes", "reads-own-kv", "writes-own-kv"})
"""Checks that a backend may fail because it reads new k and v with wrong strides, or refuses their strides."""


def fails(drive: Run, described: Described, plan: Plan, asked: CaseRun) -> bool:
    """Return whether a case-run fails, without a diagnosis. Raises what ``drive`` raises."""
    environment = planned(plan.device, plan.header.device)
    outcome, _ = _evaluated(drive, described, asked.case, asked.execution, environment)
    return bool(outcome.findings or outcome.record.lost)


def _unless_lost(drive: Run) -> Run:
    """Wrap ``drive`` for questions after a failure: if the worker dies, the answer is "wrong"."""

    def ask(request: RunCase | Rerun) -> RunRecord:
        try:
            return drive(request)
        except WorkerLost:
            return RunRecord()

    return ask


def _evaluated(
    drive: Run, described: Described, case: Case, execution: Execution, environment: Environment
) -> tuple[_Outcome, dict[str, float]]:
    declared = described.declared
    schedules = schedules_of(case, execution, declared, environment)
    record = drive(RunCase(case.id, execution))
    started = time.perf_counter()
    outcome = _Outcome(record, _observations(record, schedules), list(record.findings))
    for observed in outcome.observed:
        # Replays of an eager case-run are there for their bits. Their numbers are evaluated in case-runs of graphs.
        if execution is Execution.GRAPH or not observed.replay:
            _evaluate_step(outcome, observed, declared)
    if record.stage >= Stage.COMPLETED:
        missing = _missing(schedules, case, execution, declared, outcome.observed)
        outcome.findings += missing or _said(record, case, execution, declared, environment)
        if execution is Execution.EAGER and not missing:
            outcome.findings += _compared(declared, outcome.observed)
            outcome.not_compared = () if any(map(_of_last_rows, outcome.observed)) else ("mode-invariant",)
        outcome.findings += [] if outcome.failed else rounds_anew(outcome.observed)
        if execution is Execution.GRAPH and not outcome.failed:
            # If it is wrong at a replay too, it is reported there, with a place.
            outcome.findings += _not_finite([schedules[i] for i in record.not_finite_in_warm_up], record.fill, declared)
            outcome.findings += at_capture(record.uneven_warm_ups, record.written_at_capture, case)
    outcome.findings += _left_behind((*described.changed, *record.changed))
    spent = time.perf_counter() - started
    return outcome, {**record.seconds, "oracle and checks": spent}


def _said(
    record: RunRecord, case: Case, execution: Execution, declared: Capabilities, environment: Environment
) -> list[Finding]:
    """Findings about the greedy-equivalence loop, if the case has one."""
    loop = loop_of(case, execution, declared, environment)
    if loop is None:
        return []
    generated = record.generated
    if generated is None or not ran_to_its_end(generated, loop):
        return [Finding("completes", "the greedy-equivalence loop did not run to its end")]
    # Of all modes of a loop, the last one's products are the coarsest: those of extend.
    numerics = vars(schedule_for(loop.schedules[-1].case, declared).numerics) | {"new_rows_as_given": False}
    schedule = loop.schedules[0].with_numerics(**numerics)
    data = data_of_texts(schedule, generated.tokens)
    return lossless(generated, loop, expect_of(schedule, data), partial(mistake_in, schedule, loop, generated, data))


def _observations(run_record: RunRecord, schedules: Sequence[Schedule]) -> list[Observation]:
    """Observations of the worker, with the lane's own schedules and steps. Raises ``KeyError`` for an unknown step."""

    def of(record: StepRecord) -> Observation:
        schedule = schedules[record.schedule]
        step = schedule.step_named(record.step)
        return Observation(
            schedule,
            step,
            record.label,
            record.copies,
            record.ran_before,
            record.damaged,
            record.replay,
            record.padded,
            None if record.eager_run is None else of(run_record.records[record.eager_run]),
        )

    return [of(record) for record in run_record.records]


def step_inputs(schedule: Schedule, step: Step, declared: Capabilities) -> StepInputs:
    """Inputs of a step, and the expected contents of the KV pool after it."""
    case, data, (own, *others) = schedule.case, make_data(schedule, step), families_of(schedule.case)
    one_row = case.heads.layout.values_in_keys
    if others:
        parts = {each.name: step_inputs(schedule_of(schedule, each.name), step, declared) for each in (own, *others)}
        return replace(parts[own.name], data=data, packed=pack(data.q, data.k, data.v, one_row=one_row), parts=parts)
    image = partial(_image, schedule, step, data, case.kv_dtype in declared.needs.finite_page_tails)
    stored = own.memory.stored(data)
    slots, rows, limit = stored.slots, stored.rows, stored.limit
    if step.stored:
        # They are in the pool already, and k and v are not to be looked at.
        slots, rows, limit = slots[:0], rows[:, :, :0], None if limit is None else limit[:, :, :0]
        data = replace(data, k=torch.full_like(data.k, torch.nan), v=torch.full_like(data.v, torch.nan))
    packed = pack(data.q, data.k, data.v, one_row=one_row, maps=case.head_maps, selected=data.selected)
    return StepInputs(data, packed, image, slots, rows, limit)


def _image(schedule: Schedule, step: Step, data: StepData, tails: bool, after: bool) -> torch.Tensor:
    return family_of(schedule.case).memory.image(schedule, step, data, tails, after=after or step.stored)


def _evaluate_step(outcome: _Outcome, observed: Observation, declared: Capabilities) -> None:
    # The inputs are made for each step and freed after it: those of a whole case may take half a gigabyte.
    given = replace(observed, inputs=step_inputs(observed.schedule, observed.step, declared))
    comparison = Comparison(given, expect(observed.schedule, observed.step))
    found = evaluate_step(comparison, observed.schedule, declared)
    outcome.margin = max(outcome.margin or 0.0, min(max(comparison.margin, state_margin(comparison)), 1e9))
    for finding in found:
        outcome.failed.setdefault(finding.check, []).append(observed)
    if not found:
        outcome.passed.append(observed)
    outcome.findings += found


def _missing(
    schedules: Sequence[Schedule],
    case: Case,
    execution: Execution,
    declared: Capabilities,
    observed: Sequence[Observation],
) -> list[Finding]:
    """Findings for steps that were expected but did not run: a run that ends early without an error does not pass."""
    seen = [(each.schedule.case.id, each.step.name, each.replay) for each in observed]
    absent = [name for name in _due(schedules, case, execution, declared) if seen.count(name) < 1]
    if not absent:
        return []
    names = ", ".join(f"{'replay of ' if replay else ''}{step}" for _, step, replay in absent[:3])
    return [Finding("completes", f"{len(absent)} expected steps did not run: {names}")]


def _due(
    schedules: Sequence[Schedule], case: Case, execution: Execution, declared: Capabilities
) -> Iterator[tuple[str, str, bool]]:
    """(case id, name of the step, whether it is a replay) of every step of a case-run."""
    if execution is Execution.EAGER:
        own = schedules[0]
        first = own.steps[0]
        yield own.case.id, first.name, False
        yield from ((own.case.id, chunk.name, False) for chunk in own.chunks)
        if declared.server.takes_empty_batches:
            yield from ((own.case.id, idle.name, False) for idle in own.idle)
        yield own.case.id, own.second.name, False
        if declared.promises.batch_invariant and first.bs > 1:
            yield from ((own.case.id, few.name, False) for few in with_other_requests(case, first))
        eager = [other for other in schedules[1:] if other.case.mode in declared.eager]
        yield from ((other.case.id, other.steps[0].name, False) for other in eager)
        for captured in captured_for_bits(schedules, declared):
            yield from ((captured.case.id, step.name, True) for step in replayed_for_bits(captured))
        return
    for schedule in in_graphs(schedules, declared):
        for step in schedule.steps:
            yield schedule.case.id, step.name, True
            if schedule.runs_eagerly(step, declared):
                yield schedule.case.id, step.name, False
    for schedule in schedules[1:]:
        if schedule.case.mode in declared.eager:
            yield schedule.case.id, last_live(schedule).name, False


def _compared(declared: Capabilities, observed: Sequence[Observation]) -> list[Finding]:
    """Compare eager runs of the same numbers with each other."""
    first, again, *others = observed
    found = repeatable(first, again) if declared.promises.deterministic else []
    parts = [each for each in others if each.step.part_of is not None]
    found += next(filter(None, (batch_invariant(first, each) for each in parts)), [])
    last_rows = [each for each in others if each.replay or _of_last_rows(each)]
    return found + next(filter(None, (mode_invariant(first, each) for each in last_rows)), [])


def _of_last_rows(observed: Observation) -> bool:
    """True for rows of another mode that have the bits of an extend's."""
    return observed.step.name.startswith(LAST_ROWS)


def _keys_of_all_rows(case: Case, declared: Capabilities) -> int:
    """The smallest fill value with which each row of a captured request sees a key."""
    counts_rows = case.mode is ForwardMode.TARGET_VERIFY and dialect_of(declared, case).verify_lens == "all"
    return case.width if counts_rows else 1


def _skips_all_rows(case: Case) -> bool:
    """True if a capture has no row to compute: every request of it is padding, and padding is skipped (SGLang)."""
    return case.state is not None and case.state.padding != "write_zero"


_ONE_KEY_IN_SPLITS = "; or a KV split without keys (here all but one) does not give 0 and -inf"


def _not_finite(schedules: Sequence[Schedule], fill: int, declared: Capabilities) -> list[Finding]:
    """Capture runs on real kernels: a decode or verify of one key must not give NaN (servers assert it).

    With no key at all, and where rows are packed after the accepted ones, it may. So may rows that no key is left for,
    where lengths count the rows themselves and the fill value is less: servers that count so fill in the rows (vLLM's
    ``InputBatch.make_dummy``).
    """
    asked = [
        schedule
        for schedule in schedules
        if fill >= _keys_of_all_rows(schedule.case, declared)
        and not schedule.case.new
        and not _skips_all_rows(schedule.case)
    ]
    return [
        Finding(
            "finite",
            "the warm-up before capture gives NaN or Inf",
            where=f"bucket {schedule.buckets[-1]}, every seq_lens at the fill value {fill}",
            hint="the metadata of the capture do not contain seq_lens (zero keys give 0 / 0), or rows of one key are "
            "never written" + _ONE_KEY_IN_SPLITS * (schedule.case.kv_splits not in ("", "whole")),
        )
        for schedule in asked[:1]
    ]


def _left_behind(changed: Sequence[str]) -> list[Finding]:
    if not changed:
        return []
    return [
        Finding(
            "leaves-process-alone",
            f"the backend changed its process and did not restore it: {changed[0]}",
            where="\n".join(changed[:5]),
            hint="a server shares its process with other code: set it only for the block that needs it, and restore it",
        )
    ]


def _first_of_each_check(findings: Sequence[Finding]) -> dict[str, Finding]:
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.check, finding)
    return first


def _explained(outcome: _Outcome, rerunner: Rerunner, *, cause: bool) -> list[Finding]:
    """One finding per check; wrong numbers are listed under the check that they really fail. With hints about the cause
    if the plan asks for them."""
    explained: list[Finding] = []
    numeric: Finding | None = None
    for check, finding in _first_of_each_check(outcome.findings).items():
        steps = outcome.failed.get(check, [])
        if check in NUMERIC and steps and numeric is None:
            observed = steps[0]
            asked = (rerunner, finding, observed.schedule, observed)
            finding = numeric = explain_numeric(*asked, outcome.passed) if cause else name_check(*asked)
        elif check in NUMERIC and numeric is not None:
            continue
        explained.append(_with_other_steps(finding, [seen.label for seen in steps]))
    # The cause of a wrong output is the cause of its wrong log-sum-exps, too.
    return [_as_output(each, numeric) if numeric and each.check == "log-sum-exp" else each for each in explained]


def _as_output(finding: Finding, output: Finding) -> Finding:
    """A finding about log-sum-exps with the hint about the output, if that says more."""
    if not _says_more(output.hint, finding.hint):
        return finding
    return replace(finding, attended=output.attended, hint=output.hint, keys=output.keys)


def _says_more(of_output: str, of_sums: str) -> bool:
    """True if the hint about a wrong output is to replace that about its log-sum-exps: this one is missing or a guess,
    and that one is not a guess."""
    return not of_sums or (_GUESS in of_sums and bool(of_output) and _GUESS not in of_output.splitlines()[0])


_GUESS = "robably "
"""Word of a hint that is a guess."""


def _of_unset_width(finding: Finding, rerunner: Rerunner, case: Case, declared: Capabilities) -> Finding:
    """Put a hint first if a graph is wrong because its capture did not get the width."""
    if not declared.server.takes_unset_width or case.mode not in WIDTH_OF:
        return finding
    return _with_hint(finding, blame_unset_width(rerunner, schedule_for(case, declared)))


def _with_hint(finding: Finding, why: str) -> Finding:
    """The finding with ``why`` before its own hints; ``why`` may be empty."""
    return replace(finding, hint="\n".join(filter(None, (why, finding.hint))))


def _with_hint_after(finding: Finding, why: str) -> Finding:
    return replace(finding, hint="\n".join(filter(None, (finding.hint, why))))


_CUT = (
    "the diagnosis was stopped after {:g} s, so a better hint may be missing; the command of `repro` has no such limit"
)


def _of_variant(finding: Finding, case: Case) -> Finding:
    """Add a note on a convention of this case's server that other servers do not have, if there is one."""
    if not case.variants:
        return finding
    return _with_hint_after(finding, f"{NOTE_ON_THE_CASE}{variant_of(case).about}")


def _with_other_steps(finding: Finding, labels: Sequence[str]) -> Finding:
    replays = [label.split(" of ")[0].removeprefix("replay ") for label in labels[1:] if label.startswith("replay ")]
    others = [*dict.fromkeys(replays)]
    if not others:
        return finding
    return replace(finding, step=f"{finding.step}; also in replay{'s'[: len(others) - 1]} {', '.join(others)}")


def _result(
    item: Item,
    plan: Plan,
    declared: Capabilities,
    case: Case,
    execution: Execution,
    outcome: _Outcome,
    seconds: dict[str, float],
    status: Status,
    reason: str = "",
) -> CaseResult:
    device = plan.header.device
    failed = [finding.check for finding in outcome.findings]
    stage = Stage(outcome.record.stage)
    steps_right = stage >= Stage.COMPLETED and bool(outcome.passed) and not outcome.failed
    done, not_evaluated = evaluated(
        declared, execution, stage, failed, case, outcome.not_compared, steps_right=steps_right
    )
    return CaseResult(
        backend=item.backend,
        mode=item.mode,
        execution=item.execution,
        case=item.case,
        status=status,
        findings=tuple(outcome.findings),
        checks=done,
        not_evaluated=not_evaluated,
        margin=outcome.margin,
        seconds={name: round(value, 6) for name, value in seconds.items()},
        graph=device if execution is Execution.GRAPH else "",
        device=device,
        kernels=outcome.record.kernels,
        launches=outcome.record.launches,
        memory=outcome.record.memory,
        reason=reason,
        hints=outcome.record.notes,
    )
