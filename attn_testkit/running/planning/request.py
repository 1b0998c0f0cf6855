"""Request and plan of a run, as plain values: imports no torch and nothing of a backend."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from ...registry import UsageError, did_you_mean, unknown
from ...reports.verdict import conclude
from ...results.case_result import CaseResult, Status
from ...results.finding import Finding
from ...results.names import EXECUTIONS as EXECUTIONS
from ...results.names import KIT_ERROR, NO_CASE, NOT_STARTED
from ...results.names import MODES as MODES
from ...results.run_header import RunHeader, Selection
from .candidate import Candidate
from .known_failures import KnownFailure, Ledger, load_known

TIERS = ("smoke", "core", "full")
ORDERS = ("listed", "plainest", "most valuable")

Explains = Literal["nothing", "check", "cause"]
"""``nothing``: a finding has the check that saw it. ``check``: it has the check that it really fails, such as
``padding-inert`` for what ``matches-oracle`` saw. ``cause``: it says, too, what was attended to, and has hints."""

Diagnose = Literal["first", "all", "none"]
"""Failures whose cause is looked for: the first of each symptom, all, or none."""
DIAGNOSE: tuple[Diagnose, ...] = ("first", "all", "none")

DIAGNOSE_SECONDS = 20.0
"""Time of the diagnosis of one case-run: without a limit it can take several times as long as the case-run itself."""

MOST_SECONDS = 86_400.0
"""A case-run that is not over after a day is not waited for, and no run has a longer budget."""


def checked_device(name: str) -> str:
    """The name, if a device can be called so. Raises ``UsageError``."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        near = "; did you mean 'cuda'?" if name.startswith("gpu") else did_you_mean(name, ("auto", "cuda", "cpu"))
        raise UsageError(f"unknown device {name!r}{near} (auto, cuda, cuda:0, or cpu, which emulates CUDA)")
    return name


def checked_seconds(value: float, what: str = "timeout") -> float:
    """The value, if a case-run may take so long, or a run. Raises ``UsageError``."""
    if not 0 < value <= MOST_SECONDS:
        raise UsageError(f"{what} is {value:g}; expected seconds above 0, and at most {MOST_SECONDS:g}")
    return value


@dataclass(frozen=True)
class Request:
    """The user's selection. Raises ``UsageError`` for an impossible device, seed or order."""

    backends: tuple[str | Candidate, ...]
    modes: tuple[str, ...] = ()
    executions: tuple[str, ...] = ()
    tier: str = "smoke"
    device: str = "auto"
    seed: int = 0
    cases: tuple[str, ...] = ()
    """Globs on case ids of the tier, or exact ids of any case."""
    command: str = ""
    """Front end or command that made the request, for the results file."""
    order: str = "listed"
    """Order of the plan's case-runs: one of ``ORDERS``. ``listed``: as in the catalogue. ``plainest``:
    ``planning/order.py``, for a run that stops at the first failure. ``most valuable``:
    ``planning/most_valuable.py``, for a run that may have no time for all."""
    failed_before: tuple[tuple[str, str], ...] = ()
    """(backend, case id) of what failed the last time: first among the most valuable."""
    keep_unloadable: bool = False
    """True makes a backend that cannot be imported a failing row instead of a ``UsageError``, and the others run."""
    counts_tier: bool = False
    """The plan of a selection also counts what the tier plans without it, for a verdict that says how much was left
    out. That takes the time of planning all of it."""
    cases_from: str = ""
    """The file that ``cases`` were read from, for the words of the verdict."""

    def __post_init__(self) -> None:
        checked_device(self.device)
        if not isinstance(self.seed, int) or self.seed < 0:
            raise UsageError(f"seed is {self.seed!r}; expected a whole number from 0 up")
        if self.order not in ORDERS:
            raise UsageError(f"unknown order {self.order!r} (known: {', '.join(ORDERS)})")

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every backend that was named, once, in order."""
        found = (named if isinstance(named, Candidate) else Candidate(named) for named in self.backends)
        return tuple(dict.fromkeys(found))

    @property
    def selected_by(self) -> tuple[str, ...]:
        """Arguments that select case-runs, in words; empty if none does."""
        cases = f"the cases of {self.cases_from}" if self.cases_from else f"case {_few([*map(repr, self.cases)])}"
        words = (
            (self.modes, f"mode {_few(self.modes)}"),
            (self.executions, f"execution {_few(self.executions)}"),
            (self.cases, cases),
        )
        return tuple(text for given, text in words if given)


def _few(values: Sequence[str]) -> str:
    """The values if they are few, else the first ones and the number of the rest."""
    more = f" and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
    return ", ".join(values[:MOST_NAMED]) + more


MOST_NAMED = 3
"""Number of values of an option that a verdict names."""


@dataclass(frozen=True)
class Options:
    """Settings of a run. Raises ``UsageError`` for impossible numbers."""

    jobs: int = 1
    """Processes that run backends at the same time."""
    timeout_s: float = 300.0
    """Seconds that one case-run may take; after a failure each run of the diagnosis may take as long."""
    gpus: tuple[str, ...] = ()
    """``CUDA_VISIBLE_DEVICES`` values, assigned to the processes in rotation; empty: all use what is visible."""
    in_process: bool = False
    """Run the backend in this process, for debuggers. Such a run is not a gate."""
    after: tuple[str, ...] = ()
    """``eager:CASE`` or ``graph:CASE``: case-runs that every process runs first."""
    budget_s: float | None = None
    """Seconds after which no further case-run is begun; planning counts. The rest is reported as not run."""
    spent_s: float = 0.0
    """Seconds of them that were over before this judge began: it takes the place of one that died."""
    asks_afresh: bool = True
    """True runs a failed case-run again in a fresh process, to see whether an earlier one is the cause."""
    diagnose: Diagnose = "first"
    """Failures whose cause is looked for."""
    diagnose_s: float | None = None
    """Seconds after which the diagnosis of a case-run begins no further run; None: no limit, so that findings do not
    depend on the load of the machine. Front ends for people give one.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, int) or self.jobs < 1:
            raise UsageError(f"jobs is {self.jobs!r}; expected a whole number from 1 up")
        checked_seconds(self.timeout_s)
        if self.diagnose not in DIAGNOSE:
            raise UsageError(unknown("diagnose", self.diagnose, DIAGNOSE))
        if self.diagnose_s is not None:
            checked_seconds(self.diagnose_s, "diagnose-seconds")
        if self.budget_s is not None:
            checked_seconds(self.budget_s, "budget")


@dataclass(frozen=True)
class Item:
    """One case-run to do. The id is enough to rebuild the case."""

    backend: str
    mode: str
    execution: str
    case: str
    probe: bool = False
    """True for an eager case that also tries a graph which is not declared. If that works, it leads to a hint only."""
    known: bool = False
    """A known failure may cover it: its check decides over the verdict, and is always looked for."""
    lost: str = ""
    """The end of a process of the kit, in words, that left the first attempt without a result. This is the last."""


def selection_of(request: Request, items: Sequence[Item], whole: Collection[Item] | None, failed: int) -> Selection:
    """Compare the items with the whole tier; empty if they are all of it.

    ``whole``: all that the tier plans, without probes; None if nobody counted it. ``failed``: planned rows that failed
    without running.
    """
    if not request.selected_by:
        return Selection()
    if whole is None:
        return Selection(request.selected_by)
    chosen = {replace(item, probe=False) for item in items}
    if chosen >= {*whole}:
        return Selection()
    return Selection(request.selected_by, len(whole) + failed, len(chosen - {*whole}))


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, decided before anything runs."""

    header: RunHeader
    items: tuple[Item, ...]
    preset: tuple[CaseResult, ...]
    """Rows that are known without running: unsupported, not run here."""
    candidates: tuple[Candidate, ...] = ()
    device: str = "auto"
    explains: Explains = "cause"
    """Depth of the diagnosis of wrong numbers, which takes reruns."""
    elsewhere: tuple[Item, ...] = ()
    """Case-runs of other shards."""

    def to_run(self) -> Plan:
        """The plan without its items, as needed to run any of them: it is sent with every case-run of pytest."""
        return replace(
            self,
            header=replace(self.header, explained={}, not_covered={}, notes={}, not_declared={}),
            items=(),
            preset=(),
            elsewhere=(),
        )


def param_id(item: Item | CaseResult, backends: Collection[object]) -> str:
    """Name of a case-run in a test's brackets and for ``-k``: the same in every worker and from every directory.

    ``backends``: those of the request. The spec of its only backend would be a third of the line that pytest cuts.
    """
    return f"{item.execution}-{item.case}" if len(backends) == 1 else f"{item.backend}-{item.execution}-{item.case}"


class Judge(Protocol):
    """Plans and runs, in this process or in another one."""

    def plan(self, request: Request) -> Plan:
        """Decide what to run. Raises ``UsageError``."""

    def run(self, plan: Plan, items: Sequence[Item]) -> Generator[CaseResult, None, None]:
        """Results as they come, one for each item, whatever the backend does."""

    def close(self) -> None:
        """End every process that was started."""


@dataclass(frozen=True)
class Prepared:
    """A plan without what must not be launched, and the ledger to judge the rest with."""

    request: Request
    plan: Plan
    items: tuple[Item, ...]
    """Items that are launched: those of the plan without quarantined ones."""
    preset: tuple[CaseResult, ...]
    """Results known without launching anything, quarantined ones included."""
    ledger: Ledger
    judge: Judge = field(repr=False)

    def problems(self) -> list[str]:
        """Problems of the known-failures file, seen from this run."""
        runs = [(item.backend, item.execution, item.case) for item in (*self.items, *self.plan.elsewhere)]
        runs += [(row.backend, row.execution, row.case) for row in self.preset]
        return self.ledger.problems(runs, self._exists_beyond)

    def _exists_beyond(self, entry: KnownFailure) -> bool:
        # This run may be narrower than the file: look in everything that the same backends can be asked.
        request = replace(self.request, modes=(), executions=(), tier="full", cases=(entry.cases,))
        try:
            items = self.judge.plan(request).items
        except UsageError:
            return False
        return any(entry.covers(item.backend, item.execution, item.case) for item in items)


def prepare(judge: Judge, request: Request, known: str | Path | None = None, plan: Plan | None = None) -> Prepared:
    """Plan, read the known failures, set aside what they quarantine. Raises ``UsageError``.

    ``plan``: made before, for the same request.
    """
    entries = load_known(known) if known else ()
    if not request.backends:
        raise UsageError("no backend is named; give --backend module:Class, or a name from `attn-testkit list`")
    plan = plan or judge.plan(request)
    ledger = Ledger(entries, plan.header)
    launched: list[Item] = []
    preset = list(plan.preset)
    for item in plan.items:
        row = ledger.quarantined(item.backend, item.mode, item.execution, item.case)
        if row is None:
            launched.append(replace(item, known=ledger.tolerates(item.backend, item.execution, item.case)))
        else:
            preset.append(row)
    return Prepared(request, plan, tuple(launched), tuple(preset), ledger, judge)


def bare_result(item: Item, status: Status, reason: str, device: str = "") -> CaseResult:
    """The result of a case-run that has no record: where and why, and nothing measured."""
    graph = device if item.execution == "graph" else ""
    return CaseResult(
        item.backend, item.mode, item.execution, item.case, status, reason=reason, device=device, graph=graph
    )


def not_started(item: Item, budget_s: float) -> CaseResult:
    """The result of a case-run that the budget has left no time for."""
    return bare_result(item, Status.NOT_RUN_HERE, f"{NOT_STARTED}the budget of {budget_s:g} s was over")


def unloadable(spec: str, reason: str) -> CaseResult:
    """The failing row of a backend that cannot be imported."""
    finding = Finding("completes", reason)
    return CaseResult(spec, "", "", NO_CASE, Status.FAILED, (finding,), ("completes",))


def kit_error(item: Item, reason: str) -> CaseResult:
    """The result of a case-run that our own code failed: nobody may take it for a verdict on the backend."""
    return bare_result(item, Status.CRASHED, f"{KIT_ERROR}{reason}")


def once_more(item: Item, how: str) -> Item | CaseResult:
    """The case-run to repeat after a process of the kit ended in the middle of it; after a second one, its result.

    ``how``: which process it was, and how it ended.
    """
    if not item.lost:
        return replace(item, lost=how)
    return kit_error(item, f"{how}; this was the second attempt, and in the first {item.lost}")


def final_code(
    header: RunHeader, results: Sequence[CaseResult], problems: Sequence[str] = (), interrupted: bool = False
) -> int:
    """The exit code of a run: that of its verdict."""
    return conclude(header, results, problems=problems, interrupted=interrupted).code
