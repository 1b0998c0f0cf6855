"""What the command line and the pytest plugin share: what was asked for, known failures, how a run ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..registry import UsageError
from ..results import EXECUTIONS, MODES, CaseResult, RunHeader, Status, exit_code
from .known_failures import KnownFailure, Ledger, load_known
from .pool import KIT_ERROR, bare_result, run_guarded

if TYPE_CHECKING:
    from .plan import RunPlan, WorkItem

__all__ = ["EXECUTIONS", "MODES", "TIERS", "Prepared", "Request", "final_code", "prepare", "run_here"]

TIERS = ("smoke", "core", "full")


@dataclass(frozen=True)
class Request:
    """What the user asked for, in the engine's words."""

    backends: tuple[str, ...]
    modes: tuple[str, ...] = ()
    executions: tuple[str, ...] = ()
    tier: str = "smoke"
    device: str = "auto"
    seed: int = 0
    cases: tuple[str, ...] = ()

    def plan(self) -> RunPlan:
        """Ask the engine. Imports torch; raises ``UsageError``."""
        if not self.backends:
            raise UsageError("which backend? Name one from `attn-testkit list`, or module:Class")
        from . import plan as engine

        try:
            return engine.plan_run(
                backends=self.backends,
                modes=self.modes,
                executions=self.executions,
                tier=self.tier,
                device=self.device,
                seed=self.seed,
                cases=self.cases,
            )
        except engine.UsageError as error:
            raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Prepared:
    """A plan without what must not be launched, and the ledger to judge the rest with."""

    request: Request
    plan: RunPlan
    given: tuple[CaseResult, ...]
    """Results known without launching anything."""
    ledger: Ledger

    def problems(self) -> list[str]:
        """What is wrong with the known-failures file, seen from this run."""
        runs = [(item.backend, str(item.execution.value), item.case.id) for item in self.plan.items]
        runs += [(row.backend, row.execution, row.case) for row in self.given]
        return self.ledger.problems(runs, self._exists_beyond)

    def _exists_beyond(self, entry: KnownFailure) -> bool:
        # This run may be narrower than the file: look in everything that the same backends can be asked.
        request = replace(self.request, modes=(), executions=(), tier="full", cases=(entry.cases,))
        try:
            items = request.plan().items
        except UsageError:
            return False
        return any(entry.covers(item.backend, str(item.execution.value), item.case.id) for item in items)


def prepare(request: Request, known: str | Path | None = None) -> Prepared:
    """Plan, read the known failures, set aside what they quarantine."""
    entries = load_known(known) if known else ()
    plan = request.plan()
    ledger = Ledger(entries, plan.header)
    launched: list[WorkItem] = []
    given = list(plan.given)
    for item in plan.items:
        row = ledger.quarantined(item.backend, str(item.mode.value), str(item.execution.value), item.case.id)
        if row is None:
            launched.append(item)
        else:
            given.append(row)
    return Prepared(request, replace(plan, items=tuple(launched)), tuple(given), ledger)


def run_here(plan: RunPlan) -> Iterator[CaseResult]:
    """Run the items in this process. After the device's context is lost, the rest is accounted for, not run."""
    from . import plan as engine

    lost = ""
    for item in plan.items:
        if lost:
            yield bare_result(item, Status.NOT_RUN_HERE, lost)
            continue
        result = run_guarded(engine, item, plan)
        if result.status is Status.CRASHED and not result.reason.startswith(KIT_ERROR):
            lost = f"not run: the device's context was lost in {item.case.id}"
        yield result


def final_code(
    header: RunHeader, results: Sequence[CaseResult], problems: Sequence[str] = (), interrupted: bool = False
) -> int:
    """The exit code of a run: ``results.exit_code``, 3 when our own code failed, never 0 with a problem."""
    code = exit_code(header.planned, results, interrupted)
    if code == 2:
        return code
    if any(result.reason.startswith(KIT_ERROR) for result in results):
        return 3
    return 1 if problems and code in (0, 5) else code
