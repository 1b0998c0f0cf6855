"""One task: a bug, tried until the first case that catches it, or a mode of a known-good backend, tried to the end."""

from __future__ import annotations

import fnmatch
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, zip_longest

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import AttentionBackend
from attn_testkit.registry import UsageError, did_you_mean
from attn_testkit.results.case_result import BAD, Status
from attn_testkit.results.failure_text import format_failure
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Plan, Request

from ..faults import CorpusEntry, all_controls, all_faults
from ..faults.adversarial import Adversarial, all_adversarial
from ..faults.catalogue import entry_of, field_bugs_in
from .verdicts import ControlVerdict, FaultVerdict, Settings, Task, Verdict

_GRAPH_COST = 6
"""Approximate duration of a graph case-run, in eager ones."""
_MIXED_AT = 5
"""Index in a mode's list at which the case that mixes modes is tried."""
_MOST_TEXTS = 3
_TURNS = 3


def tasks_for(settings: Settings) -> list[Task]:
    """Faults, controls and adversarial backends that the globs name, the longest first.

    Raises ``UsageError`` when they name nothing.
    """

    def chosen(entry: CorpusEntry | Adversarial) -> bool:
        return not settings.faults or any(fnmatch.fnmatchcase(entry.slug, glob) for glob in settings.faults)

    letters = settings.classes.upper()
    if settings.field_bugs:
        bugs = known_good = field_bugs_in(settings.field_bugs)
    else:
        bugs, known_good = all_faults(), () if letters else all_controls()
    tasks = [Task("fault", bug.slug) for bug in bugs if chosen(bug) and (not letters or bug.bug_class in letters)]
    tasks += [
        Task("control", entry.slug, mode.value, execution.value)
        for entry in known_good
        if chosen(entry)
        for mode, execution in entry.runs
    ]
    if not letters and not settings.field_bugs:
        tasks += [Task("adversarial", entry.slug) for entry in all_adversarial() if chosen(entry)]
    if not tasks:
        asked = settings.faults or (settings.classes or settings.field_bugs,)
        names = [entry.slug for entry in (*bugs, *all_controls())] + [entry.slug for entry in all_adversarial()]
        letters = "".join(sorted({bug.bug_class for bug in bugs}))
        known = f"; the classes are {letters}" if settings.classes else did_you_mean(asked[0], names)
        raise UsageError(f"no fault matches {', '.join(asked)}{known}")
    # The longest first, so that none runs by itself at the end; tasks with the same cases follow each other, because
    # they share the oracle's answers.
    return sorted(tasks, key=lambda task: (task.kind != "control", task.mode, task.name, task.execution == "eager"))


def kill_order(items: Sequence[Item], first: tuple[str, str] | None = None) -> list[Item]:
    """Order cases by cost: modes and executions alternate, each as often as its cost allows. The order does not depend
    on the fault.

    As in a run, everything under no_grad comes before everything under inference_mode. ``first``: (execution, case)
    that comes before all others, if it is among them.
    """
    modes = [parse_case(item.case).inference_mode for item in items]
    by_mode = [[item for item, mode in zip(items, modes, strict=True) if mode is wanted] for wanted in (False, True)]
    order = [*_taking_turns(by_mode[0]), *_taking_turns(by_mode[1])]
    return sorted(order, key=lambda item: (item.execution, item.case) != first)


def _taking_turns(items: Sequence[Item]) -> list[Item]:
    lists: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        lists.setdefault((item.execution, item.mode), []).append(item)
    streams = {key: _from_both_ends(listed) for key, listed in lists.items()}
    for stream in streams.values():
        mixed = [item for item in stream if parse_case(item.case).multi_mode]
        for item in mixed:
            stream.remove(item)
            stream.insert(_MIXED_AT, item)
    spent = dict.fromkeys(streams, 0.0)
    order: list[Item] = []
    while streams:
        key = min(streams, key=lambda k: (spent[k], k))
        order.append(streams[key].popleft())
        spent[key] += _GRAPH_COST if key[0] == "graph" else 1
        if not streams[key]:
            del streams[key]
    return order


def _from_both_ends(items: Sequence[Item]) -> deque[Item]:
    """A mode's list begins with its covering array and ends with cases that try what the array leaves out."""
    half = (len(items) + 1) // 2
    pairs = zip_longest(items[:half], reversed(items[half:]))
    return deque(item for pair in pairs for item in pair if item is not None)


def run_task(task: Task, settings: Settings, runner: Runner) -> Verdict:
    """Run a bug or a known-good backend on workers of ``runner``, in a process that runs only this backend."""
    entry = entry_of(task.name)
    return _run_bug(entry, settings, runner) if task.kind == "fault" else _run_healthy(entry, task, settings, runner)


def _plan(
    entry: CorpusEntry, backend: type[AttentionBackend] | None, settings: Settings, runs: Sequence[tuple[str, str]]
) -> Plan:
    assert backend is not None, "only an entry with a known-good backend is tried as one"
    request = Request(
        backends=(Candidate(f"{backend.__module__}:{backend.__qualname__}"),),
        modes=tuple(dict.fromkeys(mode for mode, _ in runs)),
        executions=tuple(dict.fromkeys(execution for _, execution in runs)),
        tier=settings.tier,
        device=settings.device,
        seed=settings.seed,
        cases=(entry.case,) if entry.case else (),
        command="attn-testkit audit",
    )
    # The kit's own broken backends can be imported here: no worker has to report their capabilities.
    plan = plan_run(request, lambda _: backend.capabilities)
    # The check of a field bug is compared, and no hint: to look for the cause takes longer than all else.
    return replace(plan, explains="check") if entry.case else plan


def _run_bug(entry: CorpusEntry, settings: Settings, runner: Runner) -> FaultVerdict:
    verdict = FaultVerdict(entry.slug, entry.bug_class, entry.source, entry.checks)
    started = time.perf_counter()
    plan = _plan(entry, entry.backend, settings, [(mode.value, execution.value) for mode, execution in entry.runs])
    preset = (row for row in plan.preset if row.status in BAD)
    count = 0
    order = kill_order(plan.items, settings.caught_before.get(entry.slug))
    # Mostly it is caught in the first few: what is begun ahead would be for nothing.
    with closing(runner.run(plan, order, ahead=False)) as results:
        for count, result in enumerate(chain(preset, results), start=1):
            if result.status in BAD:
                checks = tuple(finding.check for finding in result.findings) or (str(result.status),)
                return replace(
                    verdict, caught_by=checks, case=result.case, mode=result.mode, execution=result.execution,
                    text=format_failure(result, plan.header), case_runs=count, seconds=time.perf_counter() - started,
                    lost=result.status is Status.CRASHED,
                )  # fmt: skip
    absent = next((row.reason for row in plan.preset if row.status is Status.NOT_RUN_HERE), "")
    not_run = "" if count else absent or "none of its modes is declared"
    return replace(verdict, case_runs=count, seconds=time.perf_counter() - started, not_run=not_run)


def _turn(items: Sequence[Item], control: int, settings: Settings) -> Sequence[Item]:
    """Every third case: the next control and the next seed have a different third, so three seeds run all cases.

    Controls run to the end, and their graph cases cost more than all faults together.
    """
    return items if settings.tier == "smoke" else items[(control + settings.seed) % _TURNS :: _TURNS]


def _run_healthy(entry: CorpusEntry, task: Task, settings: Settings, runner: Runner) -> ControlVerdict:
    started = time.perf_counter()
    plan = _plan(entry, entry.healthy, settings, [(task.mode, task.execution)])
    texts, count, alarms, lost = [], 0, 0, False
    items: Sequence[Item] = plan.items
    if task.execution == "graph" and not entry.case:
        items = _turn(items, all_controls().index(entry), settings)
    with closing(runner.run(plan, items)) as results:
        for result in chain(plan.preset, results):
            count += bool(result.case)
            if result.status is not Status.PASSED:
                alarms += 1
                texts.append(format_failure(result, plan.header))
            if lost := result.status is Status.CRASHED:
                break
    seconds = time.perf_counter() - started
    return ControlVerdict(
        task.name, task.mode, task.execution, count, alarms, tuple(texts[:_MOST_TEXTS]), seconds, lost
    )
