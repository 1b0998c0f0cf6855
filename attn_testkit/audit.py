"""The kit judged by its faults: every broken backend must be caught, every healthy twin must pass.

One task is one fault, tried until the first case that catches it, or one mode of a twin, tried to the end. Tasks are
spread over child processes; a fault that kills or hangs its process costs one process, and counts as caught so.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from .checks.promises import PROMISES
from .engine import RunPlan, WorkItem, plan_run, run_item
from .environment import resolve
from .faults import all_faults, all_twins
from .graphs.capture import settle
from .registry import UsageError, did_you_mean
from .results import BAD, CaseResult, Status, format_failure

__all__ = ["Audit", "FaultVerdict", "Settings", "Task", "TwinVerdict", "audit", "kill_order", "tasks_for"]

_GRAPH_COST = 6
"""A graph case-run takes about so many times as long as an eager one."""
_MIXED_AT = 5
"""Where in a mode's list the case that mixes modes is tried."""
_MOST_TEXTS = 3


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    tier: str = "core"
    device: str = "auto"
    seed: int = 0
    faults: tuple[str, ...] = ()
    """Globs on slugs and on names of twins; empty: all."""
    classes: str = ""
    """Letters of classes of bugs, and no twins; empty: all."""
    jobs: int = 2
    timeout_s: float = 240.0
    """For one task; twins get five times as long."""


@dataclass(frozen=True)
class Task:
    """A fault, or one mode and execution of a twin."""

    kind: str
    """``fault`` or ``twin``."""
    name: str
    mode: str = ""
    execution: str = ""


@dataclass(frozen=True)
class FaultVerdict:
    """What became of one fault."""

    slug: str
    bug_class: str
    source: str
    expected: tuple[str, ...]
    caught_by: tuple[str, ...] = ()
    """Promises of the first case that caught it, as reported; ``crashed`` and ``timed out`` among them."""
    case: str = ""
    mode: str = ""
    execution: str = ""
    text: str = ""
    """The failure as a user would see it."""
    case_runs: int = 0
    """Case-runs until it was caught, that one included."""
    seconds: float = 0.0
    not_run: str = ""
    """Why nothing could be run here."""

    @property
    def caught(self) -> bool:
        """Whether anything was reported."""
        return bool(self.caught_by)

    @property
    def first(self) -> str:
        """The promise that was reported first."""
        return self.caught_by[0] if self.caught_by else ""

    @property
    def as_expected(self) -> bool:
        """Whether a promise that must catch it did."""
        return bool(set(self.caught_by) & set(self.expected))


@dataclass(frozen=True)
class TwinVerdict:
    """What became of one mode and execution of a twin."""

    name: str
    mode: str
    execution: str
    case_runs: int = 0
    alarms: int = 0
    texts: tuple[str, ...] = ()
    seconds: float = 0.0


Verdict = FaultVerdict | TwinVerdict


@dataclass
class Audit:
    """Everything that came out."""

    settings: Settings
    faults: list[FaultVerdict] = field(default_factory=list)
    twins: list[TwinVerdict] = field(default_factory=list)
    seconds: float = 0.0
    device: str = ""

    @property
    def survivors(self) -> list[FaultVerdict]:
        """Faults that nothing caught, or that could not be run."""
        return [verdict for verdict in self.faults if not verdict.caught]

    @property
    def alarms(self) -> list[TwinVerdict]:
        """Twins that were found fault with."""
        return [verdict for verdict in self.twins if verdict.alarms]

    @property
    def first_catches(self) -> dict[str, int]:
        """Promise -> faults of which it is reported first."""
        counts = Counter(verdict.first for verdict in self.faults if verdict.caught)
        return {promise: counts[promise] for promise in (*PROMISES, "crashed", "timed out") if promise in PROMISES
                or counts[promise]}  # fmt: skip

    @property
    def idle_promises(self) -> list[str]:
        """Promises that are first for no fault. Not known when only some faults were tried."""
        return (
            []
            if self.settings.faults or self.settings.classes
            else [p for p, count in self.first_catches.items() if not count]
        )

    @property
    def exit_code(self) -> int:
        """1 on any survivor, false alarm or idle promise; 5 when nothing was tried."""
        if not self.faults and not self.twins:
            return 5
        return 1 if self.survivors or self.alarms or self.idle_promises else 0

    def as_plain(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "settings": asdict(self.settings),
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "first_catches": self.first_catches,
            "idle_promises": self.idle_promises,
            "survivors": [verdict.slug for verdict in self.survivors],
            "false_alarms": sum(verdict.alarms for verdict in self.twins),
            "faults": [asdict(verdict) for verdict in self.faults],
            "twins": [asdict(verdict) for verdict in self.twins],
        }


def tasks_for(settings: Settings) -> list[Task]:
    """Faults and twins that the globs name. Raises ``UsageError`` when they name nothing."""

    def chosen(name: str) -> bool:
        return not settings.faults or any(fnmatch.fnmatchcase(name, glob) for glob in settings.faults)

    letters = settings.classes.upper()
    tasks = [
        Task("fault", fault.slug)
        for fault in all_faults()
        if chosen(fault.slug) and (not letters or fault.bug_class in letters)
    ]
    for twin in () if letters else all_twins():
        claims = twin.backend.capabilities
        for execution, modes in (("graph", claims.graph), ("eager", claims.eager)):
            tasks += [Task("twin", twin.name, mode.value, execution) for mode in sorted(modes) if chosen(twin.name)]
    if not tasks:
        names = [fault.slug for fault in all_faults()] + [twin.name for twin in all_twins()]
        asked = settings.faults or (settings.classes,)
        raise UsageError(f"no fault matches {', '.join(asked)}{did_you_mean(asked[0], names)}")
    # The longest first, so that no process is left alone with one at the end.
    return sorted(tasks, key=lambda task: (task.kind == "fault", task.execution == "eager"))


def kill_order(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Cheap first: modes and executions take turns, each as often as its cost allows. The order knows no fault."""
    streams: dict[tuple[str, str], deque[WorkItem]] = {}
    for item in items:
        streams.setdefault((item.execution.value, item.mode.value), deque()).append(item)
    for stream in streams.values():
        mixed = [item for item in stream if item.case.mixed]
        for item in mixed:
            stream.remove(item)
            stream.insert(_MIXED_AT, item)
    spent = dict.fromkeys(streams, 0.0)
    order: list[WorkItem] = []
    while streams:
        key = min(streams, key=lambda k: (spent[k], k))
        order.append(streams[key].popleft())
        spent[key] += _GRAPH_COST if key[0] == "graph" else 1
        if not streams[key]:
            del streams[key]
    return order


def run_task(task: Task, settings: Settings) -> Verdict:
    """One task, in this process."""
    return _run_fault(task, settings) if task.kind == "fault" else _run_twin(task, settings)


def _plan(spec: str, settings: Settings, modes: Sequence[str], executions: Sequence[str]) -> RunPlan:
    return plan_run(
        backends=[spec],
        modes=modes,
        executions=executions,
        tier=settings.tier,
        device=settings.device,
        seed=settings.seed,
    )


def _run_fault(task: Task, settings: Settings) -> FaultVerdict:
    fault = next(fault for fault in all_faults() if fault.slug == task.name)
    verdict = FaultVerdict(fault.slug, fault.bug_class, fault.source, fault.promises)
    started = time.perf_counter()
    plan = _plan(fault.spec, settings, [m.value for m in fault.modes], [e.value for e in fault.executions])
    given = (row for row in plan.given if row.status in BAD)
    count = 0
    for count, result in enumerate(chain(given, (run_item(item, plan) for item in kill_order(plan.items))), start=1):
        if result.status in BAD:
            return _caught(verdict, result, plan, count, time.perf_counter() - started)
    absent = next((row.reason for row in plan.given if row.status is Status.NOT_RUN_HERE), "")
    return FaultVerdict(
        **{**asdict(verdict), "case_runs": count, "seconds": time.perf_counter() - started,
           "not_run": "" if count else absent or "none of its modes is claimed"}
    )  # fmt: skip


def _caught(verdict: FaultVerdict, result: CaseResult, plan: RunPlan, count: int, seconds: float) -> FaultVerdict:
    promises = tuple(finding.check for finding in result.findings) or (str(result.status),)
    return FaultVerdict(
        **{**asdict(verdict), "caught_by": promises, "case": result.case, "mode": result.mode,
           "execution": result.execution, "text": format_failure(result, plan.header), "case_runs": count,
           "seconds": seconds}
    )  # fmt: skip


def _run_twin(task: Task, settings: Settings) -> TwinVerdict:
    twin = next(twin for twin in all_twins() if twin.name == task.name)
    started = time.perf_counter()
    plan = _plan(twin.spec, settings, [task.mode], [task.execution])
    texts, count, alarms = [], 0, 0
    for result in (*plan.given, *(run_item(item, plan) for item in plan.items)):
        count += bool(result.case)
        if result.status is not Status.PASSED:
            alarms += 1
            texts.append(format_failure(result, plan.header))
    return TwinVerdict(
        task.name, task.mode, task.execution, count, alarms, tuple(texts[:_MOST_TEXTS]), time.perf_counter() - started
    )


def audit(settings: Settings, see: Callable[[Verdict, int, int], None] | None = None) -> Audit:
    """Run everything. ``see`` is called with each verdict, how many are done, and how many there are."""
    tasks = tasks_for(settings)
    started = time.perf_counter()
    result = Audit(settings, device=resolve(settings.device).name)
    here = settings.jobs == 1 and len(tasks) == 1
    verdicts = [run_task(tasks[0], settings)] if here else _in_processes(tasks, settings)
    for count, verdict in enumerate(verdicts, start=1):
        if isinstance(verdict, FaultVerdict):
            result.faults.append(verdict)
        else:
            result.twins.append(verdict)
        if see:
            see(verdict, count, len(tasks))
    order = {fault.slug: index for index, fault in enumerate(all_faults())}
    result.faults.sort(key=lambda verdict: order[verdict.slug])
    result.twins.sort(key=lambda verdict: (verdict.name, verdict.mode, verdict.execution))
    result.seconds = time.perf_counter() - started
    return result


class _Process:
    """One child process with at most one task."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.deadline = float("inf")

    def give(self, task: Task, settings: Settings) -> None:
        """Start a task."""
        self.task = task
        # A first task waits for the imports; a twin runs all cases of a mode.
        self.deadline = time.monotonic() + settings.timeout_s * (5 if task.kind == "twin" else 1) + 60
        self.connection.send(task)

    def collect(self) -> tuple[Verdict | None, bool]:
        """The verdict, if there is one, and whether the process is of no more use."""
        assert self.task is not None
        try:
            verdict: Verdict | None = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return _lost(self.task, "crashed"), True
        if verdict is not None:
            self.task, self.deadline = None, float("inf")
            # After a lost device context nothing in this process can be believed.
            return verdict, isinstance(verdict, FaultVerdict) and verdict.first == "crashed"
        if time.monotonic() > self.deadline:
            return _lost(self.task, "timed out"), True
        return None, False

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _lost(task: Task, how: str) -> Verdict:
    if task.kind == "twin":
        return TwinVerdict(task.name, task.mode, task.execution, 1, 1, (f"{task.name}: its process {how}",))
    fault = next(fault for fault in all_faults() if fault.slug == task.name)
    return FaultVerdict(
        fault.slug, fault.bug_class, fault.source, fault.promises, (how,), text=f"{fault.slug}: its process {how}",
        case_runs=1,
    )  # fmt: skip


def _in_processes(tasks: Sequence[Task], settings: Settings) -> Iterator[Verdict]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads cost far more than they give on busy cores
    waiting = deque(tasks)
    count = max(1, min(settings.jobs, len(waiting)))
    processes = [_Process(settings) for _ in range(count)]
    try:
        while waiting or any(process.task for process in processes):
            for process in processes:
                if process.task is None and waiting:
                    process.give(waiting.popleft(), settings)
            busy: list[Connection | int] = [process.connection for process in processes if process.task]
            wait(busy, timeout=1.0)
            for index, process in enumerate(processes):
                if process.task is None:
                    continue
                verdict, spent = process.collect()
                if spent:
                    process.close()
                    processes[index] = _Process(settings)  # also when nothing waits: the list keeps its length
                if verdict is not None:
                    yield verdict
    finally:
        for process in processes:
            process.close()


def _serve(connection: Any, settings: Settings) -> None:
    """The child's side."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    all_faults(), all_twins()
    settle()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(run_task(task, settings))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
