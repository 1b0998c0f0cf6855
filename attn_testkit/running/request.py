"""What was asked for and what will be done, as plain values: no torch, nothing of a backend imported."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ..registry import UsageError
from ..results import EXECUTIONS, KIT_ERROR, MODES, CaseResult, RunHeader, Status, exit_code
from .candidate import Candidate
from .known_failures import KnownFailure, Ledger, load_known

__all__ = [
    "EXECUTIONS",
    "MODES",
    "TIERS",
    "Item",
    "Judge",
    "Options",
    "Plan",
    "Prepared",
    "Request",
    "bare_result",
    "final_code",
    "kit_error",
    "prepare",
]

TIERS = ("smoke", "core", "full")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    backends: tuple[str | Candidate, ...]
    modes: tuple[str, ...] = ()
    executions: tuple[str, ...] = ()
    tier: str = "smoke"
    device: str = "auto"
    seed: int = 0
    cases: tuple[str, ...] = ()
    """Globs on case ids of the tier, or exact ids of any case."""
    command: str = ""
    """How it was asked for, for the record."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every backend that was named, once, in order."""
        found = (named if isinstance(named, Candidate) else Candidate(named) for named in self.backends)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Options:
    """How to run it."""

    jobs: int = 1
    """Processes that run backends at the same time."""
    timeout_s: float = 300.0
    """Seconds that one case-run may take; after a failure each run of the diagnosis may take as long."""
    gpus: tuple[str, ...] = ()
    """``CUDA_VISIBLE_DEVICES`` values that the processes take turns with; empty: all use what is visible."""
    in_process: bool = False
    """No process of its own for the backend: for debuggers, and no gate."""


@dataclass(frozen=True)
class Item:
    """One case-run to do. The id alone rebuilds the case."""

    backend: str
    mode: str
    execution: str
    case: str
    probe: bool = False
    """An eager case that also tries a graph which is not claimed; if that works a hint says so, and no more."""


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, decided before anything runs."""

    header: RunHeader
    items: tuple[Item, ...]
    preset: tuple[CaseResult, ...]
    """Rows that are known without running: unsupported, not run here."""
    candidates: tuple[Candidate, ...] = ()
    device: str = "auto"


class Judge(Protocol):
    """Plans and runs, in this process or in one of its own."""

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
    """What is launched: the plan's items without quarantined ones."""
    preset: tuple[CaseResult, ...]
    """Results known without launching anything, quarantined ones included."""
    ledger: Ledger
    judge: Judge = field(repr=False)

    def problems(self) -> list[str]:
        """What is wrong with the known-failures file, seen from this run."""
        runs = [(item.backend, item.execution, item.case) for item in self.items]
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
        raise UsageError("which backend? Name one from `attn-testkit list`, or module:Class")
    plan = plan or judge.plan(request)
    ledger = Ledger(entries, plan.header)
    launched: list[Item] = []
    preset = list(plan.preset)
    for item in plan.items:
        row = ledger.quarantined(item.backend, item.mode, item.execution, item.case)
        if row is None:
            launched.append(item)
        else:
            preset.append(row)
    return Prepared(request, plan, tuple(launched), tuple(preset), ledger, judge)


def bare_result(item: Item, status: Status, reason: str, device: str = "") -> CaseResult:
    """The result of a case-run that has none of its own: where and why, and nothing measured."""
    graph = device if item.execution == "graph" else ""
    return CaseResult(
        item.backend, item.mode, item.execution, item.case, status, reason=reason, device=device, graph=graph
    )


def kit_error(item: Item, reason: str) -> CaseResult:
    """The result of a case-run that our own code failed: nobody may take it for a verdict on the backend."""
    return bare_result(item, Status.CRASHED, f"{KIT_ERROR}{reason}")


def final_code(
    header: RunHeader, results: Sequence[CaseResult], problems: Sequence[str] = (), interrupted: bool = False
) -> int:
    """The exit code of a run: ``results.exit_code``, 3 when our own code failed, never 0 with a problem."""
    return exit_code(header.planned, results, interrupted, problems)
