"""Backends x modes x executions x cases -> a plan. Planning only asks for capabilities and runs nothing."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ...cases.case import Case, parse_case
from ...cases.declared import not_declared
from ...cases.features.table import FEATURES
from ...cases.head_layouts import latent
from ...catalogue.large_cases import too_large_for_a_cpu
from ...catalogue.never_together import describe_never_together
from ...catalogue.not_covered import describe_not_covered
from ...catalogue.tiers import generate
from ...contract import Capabilities, Execution, ForwardMode
from ...distributions import digest_of_kit
from ...environment import Environment, missing_here, resolve, versions
from ...families.table import meaningful, meaningless
from ...profiles import DRAFT, read_profile
from ...registry import UsageError, capabilities_line, origin_of
from ...results.case_result import CaseResult, Status
from ...results.checks import CHECKS
from ...results.finding import Finding
from ...results.names import NO_CASE
from ...results.run_header import RunHeader, Selection
from ...results.texts import readable
from ...steps.last_rows import has_last_rows, last_rows_of
from ...steps.numerics import numerics_of
from ...steps.schedule import make_schedule
from ..hygiene.vendor_packages import NOT_HERE
from .candidate import Candidate
from .long_cases import long_cases
from .most_valuable import reaching
from .narrow import not_declared_here
from .order import ordered
from .request import Item, Plan, Request, selection_of, unloadable

CapabilitiesOf = Callable[[Candidate], Capabilities]
Broken = Callable[[Candidate], Mapping[str, str]]
"""Requirement of the capabilities -> the reason why the installed package cannot be imported."""


Notes = Callable[[Candidate], Sequence[str]]
"""Function that gives a backend's notes for the header of a run."""
Source = Callable[[Candidate], Mapping[str, str]]
"""File, hash and kernels of a backend, as in ``RunHeader.sources``."""


def plan_run(
    request: Request,
    capabilities_of: CapabilitiesOf,
    broken_of: Broken = lambda _: {},
    notes_of: Notes = lambda _: (),
    source_of: Source = lambda _: {},
) -> Plan:
    """Decide what to run. Raises ``UsageError`` for a request that makes no sense. ``broken_of``, ``notes_of`` and
    ``source_of`` are asked after ``capabilities_of``.
    """
    if not request.backends:
        raise UsageError("no backend was named; give --backend a short name or module:Class")
    modes = [*map(ForwardMode, dict.fromkeys(request.modes))] or [*ForwardMode]
    executions = [*map(Execution, dict.fromkeys(request.executions))] or [*Execution]
    exact = _exact_cases(request.named)
    environment = resolve(request.device)
    items: list[tuple[Item, Case]] = []
    preset: list[CaseResult] = []
    not_covered: dict[str, tuple[str, ...]] = {}
    lacking: dict[str, tuple[str, ...]] = {}
    excluded: dict[str, tuple[str, ...]] = {}
    notes: dict[str, tuple[str, ...]] = {}
    sources: dict[str, Mapping[str, str]] = {}
    undeclared: dict[str, tuple[str, ...]] = {}
    lines: dict[str, str] = {}
    counts = request.selected_by and request.counts_tier and not request.profile
    whole: set[Item] | None = set() if counts else None
    matched: set[str] = set()
    is_draft = request.profile and read_profile(request.profile).status == DRAFT
    drafts = (f"{request.profile} is a draft: its cases may change until its release",) if is_draft else ()
    for candidate in request.candidates:
        try:
            declared = capabilities_of(candidate)
        except UsageError as error:
            if not request.keep_unloadable:
                raise
            preset.append(unloadable(candidate.spec, str(error)))
            continue
        broken = broken_of(candidate)
        long = long_cases(exact) if environment.emulated else ()
        if noted := (*map(readable, notes_of(candidate)), *long, *drafts):
            notes[candidate.spec] = noted
        if source := source_of(candidate):
            sources[candidate.spec] = dict(source)
        first = len(items)
        for mode in modes:
            for execution in executions:
                found, rows = _of_mode(candidate.spec, declared, mode, execution, request, exact, environment, broken)
                items += found
                preset += rows
        undeclared[candidate.spec] = not_declared_here(declared)
        lines[candidate.spec] = capabilities_line(declared)
        matched |= _matched(declared, modes, request, exact) if not request.profile else set()
        if whole is not None:
            whole |= _whole(candidate.spec, declared, request, environment, broken)
        if not request.named:
            own = [case for _, case in items[first:]]
            of_modes = list(dict.fromkeys(case.mode for case in own))
            values = describe_not_covered(declared, of_modes, own)
            bits = _rows_not_compared(declared, items[first:])
            missing: tuple[str, ...] = ()
            if request.tier != "smoke":
                missing, excluded[candidate.spec] = describe_never_together(declared, of_modes, own)
                lacking[candidate.spec] = (*missing, *describe_not_covered(declared, of_modes, own, each=True))
            not_covered[candidate.spec] = (*values, *missing, *_without_eager(declared, items[first:]), *bits)
    _refuse_unmatched(request, matched, plans_nothing=not items and not preset)
    failed = sum(row.status is Status.FAILED for row in preset)
    selection = selection_of(request, [item for item, _ in items], whole, failed)
    header = _header(request, environment, len(items) + failed, not_covered, notes, sources, undeclared, selection)
    return Plan(
        header=replace(header, lacking=lacking, excluded=excluded, declared=lines if request.profile else {}),
        items=ordered(items, request.order, request.failed_before),
        order=request.order,
        since=reaching(items, request.since) if request.since else (),
        preset=tuple(preset),
        candidates=request.candidates,
        device=request.device,
    )


def _refuse_unmatched(request: Request, matched: Set[str], plans_nothing: bool) -> None:
    """Raise ``UsageError`` for a pattern of cases that matches nothing."""
    unmatched = [pattern for pattern in request.cases if pattern not in matched]
    if unmatched and (matched or plans_nothing):
        correct = "correct it or remove it (`attn-testkit list --cases` prints the ids)"
        others = f", and other patterns match; {correct}"
        raise UsageError(f"no case matches {', '.join(unmatched)}" + (others if matched else f"; {correct}"))


def _matched(declared: Capabilities, modes: Sequence[ForwardMode], request: Request, exact: Sequence[Case]) -> set[str]:
    """Patterns of the request that match a case: also a case that cannot run here, or a named case that is not
    declared."""
    ids = {case.id for case in exact if case.mode in modes}
    found = {pattern for pattern in request.cases if not _is_glob(pattern) and parse_case(pattern).id in ids}
    globs = [pattern for pattern in request.cases if _is_glob(pattern)]
    for mode in modes if globs else ():
        if any(declared.offers(mode, execution) for execution in Execution):
            planned = [case.id for case in map(meaningful, generate(declared, mode, request.tier, request.seed))]
            found |= {glob for glob in globs if any(fnmatch.fnmatchcase(case_id, glob) for case_id in planned)}
    return found


def _whole(
    spec: str, declared: Capabilities, request: Request, environment: Environment, broken: Mapping[str, str]
) -> set[Item]:
    """Everything that the tier plans for a backend on this machine, whatever the request selects."""
    everything = replace(request, modes=(), executions=(), cases=())
    return {
        replace(item, probe=False)
        for mode in ForwardMode
        for execution in Execution
        for item, _ in _of_mode(spec, declared, mode, execution, everything, (), environment, broken)[0]
    }


def _without_eager(declared: Capabilities, items: Sequence[tuple[Item, Case]]) -> tuple[str, ...]:
    """Comparisons that replays of some modes do not have, in words."""
    replayed = dict.fromkeys(case.mode for item, case in items if item.execution == Execution.GRAPH)
    modes = ", ".join(mode for mode in replayed if mode not in declared.eager)
    return (f"replays against eager runs ({modes}: declared only in graphs)",) if modes else ()


def _rows_not_compared(declared: Capabilities, items: Sequence[tuple[Item, Case]]) -> tuple[str, ...]:
    """Modes whose rows no planned case compares with rows of extend, although equal bits are declared, in words."""
    if not declared.promises.mode_invariant:
        return ()
    due = {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY} & (declared.eager | declared.graph)
    for item, case in items:
        if due and item.execution == Execution.EAGER and has_last_rows(case):
            schedule = make_schedule(case, numerics_of(case, declared))
            due -= {each.case.mode for each in last_rows_of(schedule, declared)}
    return (f"mode_invariant: equal bits of rows of extend and of {', '.join(sorted(due))}",) if due else ()


def _of_mode(
    spec: str,
    declared: Capabilities,
    mode: ForwardMode,
    execution: Execution,
    request: Request,
    exact: Sequence[Case],
    environment: Environment,
    broken: Mapping[str, str],
) -> tuple[list[tuple[Item, Case]], list[CaseResult]]:
    """Items of one mode and execution, and the rows that are known without running."""
    if not declared.offers(mode, execution):
        return [], [_row(spec, mode, execution, Status.UNSUPPORTED, "not declared")]
    if request.named and not any(map(_is_glob, request.named)) and all(case.mode is not mode for case in exact):
        # No row either if the mode cannot run here: a profile of decode says nothing about extend.
        return [], []
    absent = missing_here(declared, environment, mode) or _broken_here(declared, mode, broken)
    if absent:
        return [], [_row(spec, mode, execution, Status.NOT_RUN_HERE, absent)]
    found, refused = _cases_for(declared, mode, request, exact)
    rows = [] if found or request.named else [_unsatisfiable(spec, declared, mode, execution)]
    rows += [
        _row(spec, mode, execution, Status.UNSUPPORTED, f"not declared: {lacking}", case_id)
        for case_id, lacking in refused.items()
    ]
    if execution is Execution.GRAPH:
        eager = {case.id: why for case in found if (why := _eager_only(declared, case))}
        named = {case.id for case in exact}
        rows += [
            _row(spec, mode, execution, Status.UNSUPPORTED, why, case_id)
            for case_id, why in eager.items() if case_id in named
        ]  # fmt: skip
        found = [case for case in found if case.id not in eager]
    if environment.emulated:
        named = {case.id for case in exact}
        large = [case.id for case in found if case.id not in named and too_large_for_a_cpu(case)]
        found = [case for case in found if case.id not in large]
        rows += [_row(spec, mode, execution, Status.NOT_RUN_HERE, _TOO_LARGE, case_id) for case_id in large]
    # Not on a real device: what is not declared may crash it, and with it the other case-runs.
    probe = environment.emulated and execution is Execution.EAGER and mode not in declared.graph
    return [
        (Item(spec, mode.value, execution.value, case.id, probe and case is found[0]), case) for case in found
    ], rows


def _eager_only(declared: Capabilities, case: Case) -> str:
    """The reason why no graph runs a case, or empty text."""
    reasons = (feature.eager_only(declared, case) for feature in FEATURES if feature.eager_only)
    return next(filter(None, reasons), "")


_TOO_LARGE = "needs a GPU, or tens of gigabytes: named by its id it runs here, too"


def _broken_here(declared: Capabilities, mode: ForwardMode, broken: Mapping[str, str]) -> str:
    """Packages that this mode needs and that cannot be imported, or empty text."""
    of_mode = declared.mode_requires.get(mode)
    needed = (NOT_HERE, *declared.requires.packages, *(of_mode.packages if of_mode else ()))
    return next((broken[text] for text in needed if text in broken), "")


def _is_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def _exact_cases(patterns: Sequence[str]) -> list[Case]:
    try:
        return [parse_case(pattern) for pattern in patterns if not _is_glob(pattern)]
    except ValueError as error:
        raise UsageError(str(error)) from None


def _cases_for(
    declared: Capabilities, mode: ForwardMode, request: Request, exact: Sequence[Case]
) -> tuple[list[Case], dict[str, str]]:
    """Cases to run, and named ones that are not declared: id -> the values that are not declared."""
    named = {case.id: case for case in exact if case.mode is mode}
    refused = {case_id: lacking for case_id, case in named.items() if (lacking := _refused(declared, case))}
    chosen = {case_id: case for case_id, case in named.items() if case_id not in refused}
    globs = [pattern for pattern in request.cases if _is_glob(pattern)]
    if globs or not request.named:
        for case in map(meaningful, generate(declared, mode, request.tier, request.seed)):
            if not globs or any(fnmatch.fnmatchcase(case.id, glob) for glob in globs):
                chosen.setdefault(case.id, case)
    return list(chosen.values()), refused


def _refused(declared: Capabilities, case: Case) -> str:
    """Reason why a named case cannot run: values that are not declared, or mean nothing in its family; empty if it may
    run."""
    if lacking := not_declared(declared, case):
        return f"{lacking}{_together_with(declared, case)}"
    names = meaningless(case)
    return f"{' and '.join(names)}, which means nothing to {case.heads.family}" if names else ""


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "a window": {"window": -1, "layer_windows": "any"},
    "a soft cap": {"logit_cap": 0.0},
    "sinks": {"sinks": False},
    "its KV dtype": {"kv_dtype": "same"},
    "its KV layout": {"kv_layout": "nhd"},
}
"""Settings that may be excluded by another one -> the same case without it."""


def _together_with(declared: Capabilities, case: Case) -> str:
    """The setting without which a named case would run, in words; empty if there is no such setting.

    Both are declared then, and only the pair is excluded.
    """
    if not not_declared(declared, case).startswith("the server variant"):
        return ""
    others = {f"the server variant {word}": {"variants": case.variants - {word}} for word in sorted(case.variants)}
    for name, without in {**_SETTINGS, **others}.items():
        with contextlib.suppress(ValueError):
            changed = case.with_changes(**without)
            both = name not in not_declared(declared, case) and not not_declared(declared, changed)
            if changed != case and both and _declared_by_itself(declared, case):
                return f" together with {name}; each of them is declared, but no case combines them"
    return ""


def _declared_by_itself(declared: Capabilities, case: Case) -> bool:
    """True if any case of the mode has the server variants of this one."""
    return all(
        any(word in each.variants for each in generate(declared, case.mode, "core", case.seed))
        for word in case.variants
    )


def _row(spec: str, mode: ForwardMode, execution: Execution, status: Status, reason: str, case: str = "") -> CaseResult:
    return CaseResult(spec, mode.value, execution.value, case, status, reason=reason)


def _unsatisfiable(spec: str, declared: Capabilities, mode: ForwardMode, execution: Execution) -> CaseResult:
    hint = next(why for why, holds in _WHY_NONE if holds(declared)).format(declared=declared)
    finding = Finding(
        "capabilities-honest", f"{mode} is declared, but no case can satisfy the other capabilities with it", hint=hint
    )
    return CaseResult(
        spec,
        mode.value,
        execution.value,
        f"{mode.value}-{NO_CASE}",
        Status.FAILED,
        (finding,),
        ("capabilities-honest",),
    )


_WHY_NONE: tuple[tuple[str, Callable[[Capabilities], bool]], ...] = (
    ("families is empty", lambda c: not c.heads.families),
    ("dtypes is empty", lambda c: not c.precision.dtypes),
    ("kv_dtypes is empty", lambda c: not c.kv_pool.kv_dtypes),
    ("kv_layouts is empty", lambda c: not c.kv_pool.kv_layouts),
    ("page_sizes is empty", lambda c: not c.kv_pool.page_sizes),
    ("head_dims is empty, or holds only widths above 512", lambda c: not any(d <= 512 for d in c.heads.head_dims)),
    ("mla_rope_dims is empty", lambda c: bool(latent(c)) and not c.heads.mla_rope_dims),
    (
        "gqa_ratios is empty, and mha is not declared",
        lambda c: "mha" not in c.heads.families and not c.heads.gqa_ratios,
    ),
    (
        "gqa and mqa need a number above 1 in gqa_ratios; as many query heads as KV heads is mha",
        lambda c: c.heads.families <= {"gqa", "mqa"} and c.heads.gqa_ratios <= {1},
    ),
    (
        "max_context_len {declared.bounds.max_context_len} has no room for the shortest case: two pages next to "
        "prefix and new tokens",
        lambda c: True,
    ),
)
"""Reasons why no case can satisfy the capabilities; the first match counts."""


def _header(
    request: Request,
    environment: Environment,
    planned: int,
    not_covered: Mapping[str, tuple[str, ...]],
    notes: Mapping[str, tuple[str, ...]],
    sources: Mapping[str, Mapping[str, str]],
    not_declared: Mapping[str, tuple[str, ...]],
    selection: Selection,
) -> RunHeader:
    return RunHeader(
        kit=importlib.metadata.version("attn-testkit"),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=request.command,
        tier=request.tier_name,
        seed=request.seed,
        device=environment.kind,
        device_name=environment.name,
        versions=versions(),
        backends={candidate.spec: origin_of(candidate.spec).label for candidate in request.candidates},
        planned=planned,
        limits=environment.limits,
        not_covered=not_covered,
        notes=notes,
        sources=sources,
        explained={check.id: check.words for check in CHECKS.values()},
        not_declared=not_declared,
        selection=selection,
        profile=read_profile(request.profile).digest if request.profile else "",
        kit_digest=digest_of_kit() if request.profile else "",
    )
