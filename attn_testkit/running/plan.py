"""Backends x modes x executions x cases -> results. Knows no pytest and prints nothing."""

from __future__ import annotations

import datetime
import fnmatch
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..cases.case import Case, parse_case
from ..cases.catalogue import TIERS, generate
from ..checks.numeric import NUMERIC
from ..contract import AttentionBackend, Capabilities, Execution, ForwardMode
from ..diagnosis.blame import explain_numeric
from ..diagnosis.rerun import Bench
from ..environment import Environment, missing_here, resolve, versions
from ..graphs.capture import settle
from ..registry import UsageError, did_you_mean, load_backend, origin_of
from ..results import NO_CASE, CaseResult, Finding, Results, RunHeader, Status
from .case_run import Outcome, gradients_off, run_case

__all__ = ["RunPlan", "UsageError", "WorkItem", "check_backend", "plan_run", "run", "run_item"]

_FREEZE_EVERY = 200
"""Case-runs between two rounds of setting survivors aside from the garbage collector."""


@dataclass(frozen=True)
class WorkItem:
    """One case-run to do."""

    backend: str
    mode: ForwardMode
    execution: Execution
    case: Case
    probe: bool = False
    """An eager case that also tries a graph which is not claimed; if that works it is told as a hint, never judged."""


@dataclass(frozen=True)
class RunPlan:
    """Everything a run will do, decided before anything runs."""

    header: RunHeader
    items: tuple[WorkItem, ...]
    given: tuple[CaseResult, ...]
    """Rows that are known without running: unsupported, not run here."""
    device: str = "auto"


@lru_cache(maxsize=256)
def _loaded(spec: str) -> type[AttentionBackend]:
    """Looking a short name up reads the metadata of every installed distribution, which takes 30 ms."""
    return load_backend(spec)


def _choose(words: Sequence[str], enum: type[ForwardMode] | type[Execution], what: str) -> list[str]:
    known = [member.value for member in enum]
    for word in words:
        if word not in known:
            raise UsageError(f"unknown {what} {word!r}{did_you_mean(word, known)} (known: {', '.join(known)})")
    return list(dict.fromkeys(words)) or known


def _exact_cases(patterns: Sequence[str]) -> list[Case]:
    exact = []
    for pattern in patterns:
        if not any(c in pattern for c in "*?["):
            try:
                exact.append(parse_case(pattern))
            except ValueError as error:
                raise UsageError(str(error)) from None
    return exact


def _claims_of(spec: str, backend_class: type[AttentionBackend]) -> Capabilities:
    claims = getattr(backend_class, "capabilities", None)
    if not isinstance(claims, Capabilities):
        raise UsageError(
            f"backend {spec!r} has no capabilities; write `capabilities = Capabilities(...)` in class "
            f"{backend_class.__name__}"
        )
    return claims


def _cases_for(
    claims: Capabilities, mode: ForwardMode, tier: str, seed: int, patterns: Sequence[str], exact: Sequence[Case]
) -> list[Case]:
    chosen = {case.id: case for case in exact if case.mode is mode}
    globs = [p for p in patterns if any(c in p for c in "*?[")]
    if globs or not patterns:
        for case in generate(claims, mode, tier, seed):
            if not globs or any(fnmatch.fnmatchcase(case.id, g) for g in globs):
                chosen.setdefault(case.id, case)
    return list(chosen.values())


def plan_run(
    *,
    backends: Sequence[str],
    modes: Sequence[str] = (),
    executions: Sequence[str] = (),
    tier: str = "smoke",
    device: str = "auto",
    seed: int = 0,
    cases: Sequence[str] = (),
) -> RunPlan:
    """Decide what to run. ``cases``: globs on case ids of the tier, or exact ids of any case. Raises ``UsageError``."""
    if not backends:
        raise UsageError("no backend was named; give --backend a short name or module:Class")
    if tier not in TIERS:
        raise UsageError(f"unknown tier {tier!r}{did_you_mean(tier, TIERS)} (known: {', '.join(TIERS)})")
    chosen_modes = [ForwardMode(m) for m in _choose(modes, ForwardMode, "mode")]
    chosen_executions = [Execution(e) for e in _choose(executions, Execution, "execution")]
    exact = _exact_cases(cases)
    environment = resolve(device)
    items: list[WorkItem] = []
    given: list[CaseResult] = []
    for spec in backends:
        claims = _claims_of(spec, _loaded(spec))
        for mode in chosen_modes:
            absent = missing_here(claims, environment, mode)
            for execution in chosen_executions:
                if not claims.offers(mode, execution):
                    given.append(_row(spec, mode, execution, Status.UNSUPPORTED, "not claimed"))
                elif absent:
                    given.append(_row(spec, mode, execution, Status.NOT_RUN_HERE, absent))
                else:
                    found = _cases_for(claims, mode, tier, seed, cases, exact)
                    if not found and not cases:
                        given.append(_unsatisfiable(spec, claims, mode, execution))
                    # Not on a real device: what is not claimed may crash it, and with it the other case-runs.
                    probe = environment.emulated and execution is Execution.EAGER and mode not in claims.graph
                    items += [WorkItem(spec, mode, execution, case, probe and case is found[0]) for case in found]
    if cases and not items and not given:
        raise UsageError(f"no case matches {', '.join(cases)}")
    # Eager and graph of one case next to each other: they share data and the oracle's answer.
    order = {id(item): index for index, item in enumerate(items)}
    first = {(item.backend, item.case.id): order[id(item)] for item in reversed(items)}
    # Under no_grad first: what a module keeps for the whole process may be born there and used under inference_mode,
    # and not the other way round. A server uses one of the two.
    items.sort(
        key=lambda item: (
            item.case.inference_mode,
            first[item.backend, item.case.id],
            item.execution is Execution.GRAPH,
        )
    )
    # A claim that nothing can satisfy is claimed all the same, and so are its case-runs: one, which failed.
    planned = len(items) + sum(row.status is Status.FAILED for row in given)
    return RunPlan(_header(backends, tier, seed, environment, planned), tuple(items), tuple(given), device)


def _row(spec: str, mode: ForwardMode, execution: Execution, status: Status, reason: str) -> CaseResult:
    return CaseResult(spec, mode.value, execution.value, "", status, reason=reason)


def _unsatisfiable(spec: str, claims: Capabilities, mode: ForwardMode, execution: Execution) -> CaseResult:
    hint = next(told for told, holds in _WHY_NONE if holds(claims)).format(claims=claims)
    finding = Finding(
        "claims-honest", f"{mode} is claimed, and no case can satisfy the other claims with it", hint=hint
    )
    return CaseResult(
        spec, mode.value, execution.value, f"{mode.value}-{NO_CASE}", Status.FAILED, (finding,), ("claims-honest",)
    )


_WHY_NONE: tuple[tuple[str, Callable[[Capabilities], bool]], ...] = (
    ("families is empty", lambda c: not c.families),
    ("dtypes is empty", lambda c: not c.dtypes),
    ("kv_dtypes is empty", lambda c: not c.kv_dtypes),
    ("page_sizes is empty", lambda c: not c.page_sizes),
    ("head_dims is empty, or holds only widths above 512", lambda c: not any(d <= 512 for d in c.head_dims)),
    ("mla_rope_dims is empty", lambda c: "mla" in c.families and not c.mla_rope_dims),
    ("gqa_ratios is empty, and mha is not claimed", lambda c: "mha" not in c.families and not c.gqa_ratios),
    (
        "gqa and mqa need a number above 1 in gqa_ratios; as many query heads as KV heads is mha",
        lambda c: c.families <= {"gqa", "mqa"} and c.gqa_ratios <= {1},
    ),
    (
        "max_context_len {claims.max_context_len} has no room for the shortest case: two pages beside prefix and new "
        "tokens",
        lambda c: True,
    ),
)
"""Why no case can satisfy the claims, first match."""


def _header(backends: Sequence[str], tier: str, seed: int, environment: Environment, planned: int) -> RunHeader:
    return RunHeader(
        kit=importlib.metadata.version("attn-testkit"),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=" ".join(["attn-testkit", *sys.argv[1:]]),
        tier=tier,
        seed=seed,
        device=environment.kind,
        device_name=environment.name,
        versions=versions(),
        backends={spec: origin_of(spec).label for spec in backends},
        planned=planned,
        limits=environment.limits,
    )


def run(plan: RunPlan) -> Iterator[CaseResult]:
    """Run everything in this process, in order. After a lost device context the rest is reported as crashed."""
    yield from plan.given
    lost = ""
    for count, item in enumerate(plan.items):
        if lost:
            yield _result(item, Outcome(), plan, Status.CRASHED, f"not run: device context lost ({lost})")
            continue
        if count in (1, 8) or count % _FREEZE_EVERY == _FREEZE_EVERY - 1:
            settle()
        result = run_item(item, plan)
        if result.status is Status.CRASHED:
            lost = result.reason
        yield result


def run_item(item: WorkItem, plan: RunPlan) -> CaseResult:
    """Run one case. Whatever the backend does, this returns."""
    environment = resolve(plan.device)
    backend_class = _loaded(item.backend)
    outcome = run_case(backend_class, item.case, item.execution, environment)
    if outcome.lost:
        return _result(item, outcome, plan, Status.CRASHED, outcome.lost)
    findings = _explained(outcome, backend_class, item, environment)
    result = _result(item, replace(outcome, findings=findings), plan, Status.FAILED if findings else Status.PASSED)
    if item.probe and not findings and not run_case(backend_class, item.case, Execution.GRAPH, environment).findings:
        told = f"{item.backend}: {item.mode} captures and replays correctly under a graph, and is not claimed"
        return replace(result, hints=(told,))
    return result


def _explained(
    outcome: Outcome, backend_class: type[AttentionBackend], item: WorkItem, environment: Environment
) -> list[Finding]:
    """One finding a promise, the wrong numbers diagnosed."""
    first: dict[str, Finding] = {}
    for finding in outcome.findings:
        first.setdefault(finding.check, finding)
    told: list[Finding] = []
    diagnosed = False
    for check, finding in first.items():
        steps = outcome.failed_steps.get(check, [])
        if check in NUMERIC and steps and not diagnosed:
            diagnosed = True
            schedule, observed = steps[0]
            bench = Bench(backend_class, environment)
            with gradients_off(item.case):
                finding = explain_numeric(
                    bench, finding, schedule, observed, [seen for _, seen in outcome.passed_steps]
                )
        elif check in NUMERIC and diagnosed:
            continue
        told.append(_with_other_steps(finding, [seen.label for _, seen in steps]))
    return told


def _with_other_steps(finding: Finding, labels: list[str]) -> Finding:
    others = [label.split(" of ")[0].removeprefix("replay ") for label in labels[1:] if label.startswith("replay ")]
    if not others:
        return finding
    return replace(finding, step=f"{finding.step}; also in replays {', '.join(dict.fromkeys(others))}")


def _result(item: WorkItem, outcome: Outcome, plan: RunPlan, status: Status, reason: str = "") -> CaseResult:
    graph = plan.header.device if item.execution is Execution.GRAPH else ""
    return CaseResult(
        backend=item.backend,
        mode=item.mode.value,
        execution=item.execution.value,
        case=item.case.id,
        status=status,
        findings=tuple(outcome.findings),
        checks=tuple(sorted(outcome.checks)),
        margin=outcome.margin,
        seconds={name: round(value, 6) for name, value in outcome.clock.seconds.items()},
        graph=graph,
        device=plan.header.device,
        kernels=outcome.kernels,
        reason=reason,
    )


def check_backend(
    backend: str | type[AttentionBackend],
    *,
    tier: str = "smoke",
    device: str = "auto",
    modes: Sequence[str] = (),
    executions: Sequence[str] = (),
    seed: int = 0,
    cases: Sequence[str] = (),
) -> Results:
    """Check a backend from Python: ``print(check_backend(MyBackend))``. What comes back is a list of results."""
    spec = backend if isinstance(backend, str) else f"{backend.__module__}:{backend.__qualname__}"
    return Results(
        run(
            plan_run(
                backends=[spec], modes=modes, executions=executions, tier=tier, device=device, seed=seed, cases=cases
            )
        )
    )
