"""A lane owns the worker of a backend, lets it run cases, and evaluates the results, diagnosis included. It plans
nothing. In a run with one worker, the lane is in the process of the ``Runner``; if there are several, each lane is a
process (``lane_process.py``). So outputs cross one pipe, from worker to lane, and a lane sends only results.
"""

from __future__ import annotations

import itertools
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...cases.case import parse_case
from ...contract import Execution
from ...registry import UsageError
from ...reports.verdict import other_code
from ...results.case_result import CaseResult, Status
from ...results.names import IN_MPS
from ...runner_modes.messages import Described, Rerun, RunCase, RunRecord
from ..planning.candidate import Candidate
from ..planning.request import Item, Options, Plan, bare_result, kit_error
from ..processes.gpus import ANY_GPU, Gpu
from ..processes.host_memory import Trimmer
from ..processes.worker_process import ImportKilled, WorkerLost, WorkerStartError
from .between_cases import Afresh, explained_by_what_was_kept
from .case_run import CaseRun
from .diagnosed import Diagnosed
from .evaluate import Run, evaluate_item, fails
from .worker_slot import WorkerSlot

MOST_PRINTED = 2000
"""Number of characters of a backend's output that a result keeps: the last ones."""


@dataclass(frozen=True)
class Work:
    """One case-run for a lane."""

    item: Item
    following: Item | None
    """The next case-run, if it is known: the worker begins it while the lane evaluates this one."""
    afresh: Afresh
    """Results of repeating earlier failures of all lanes in fresh processes."""


@dataclass(frozen=True)
class Lost:
    """A case-run without a result: a process of the kit ended in the middle of it."""

    how: str


class Lane:
    """Evaluates one case-run after the other. Used by one thread; another may close it."""

    def __init__(self, options: Options, gpu: Gpu = ANY_GPU, alive: Callable[[], None] = lambda: None) -> None:
        """``alive``: called between two long operations, to show that the lane does not hang."""
        self._options, self._alive = options, alive
        self._slot = WorkerSlot(options, gpu, alive)
        self._trimmer = Trimmer()
        self._begun: tuple[Plan, Work] | None = None
        self._diagnosed = Diagnosed() if options.diagnose == "first" else None
        self.note: Callable[[str], None] = lambda text: None
        """Called with a text about each run of a diagnosis."""
        self._lost = ""
        """Reason why nothing more runs: the case-run that lost the device's context, if the backend is in this
        process."""

    def start(self, candidate: Candidate, device: str) -> None:
        """Let the worker import a backend, and do not wait for it. Raises ``WorkerStartError``."""
        self._slot.of(candidate, device)

    def describe(self, candidate: Candidate, device: str, meanwhile: Callable[[], None] = lambda: None) -> Described:
        """Return what a backend declares. Raises ``UsageError`` if it cannot be imported, and ``WorkerStartError``.

        ``meanwhile``: called while the worker imports it.
        """
        worker = self._slot.of(candidate, device)
        meanwhile()
        try:
            return worker.describe()
        except ImportKilled:
            return self._slot.of(candidate, device).describe()

    def run(self, plan: Plan, work: Work) -> tuple[CaseResult | Lost, bool | None]:
        """Run and evaluate one case. After a failure, report whether a fresh process fails, too (None: not tried).
        Always returns, whatever the backend or the kit does: ``Lost`` if there was no worker for the case.
        """
        if self._lost:
            return bare_result(work.item, Status.NOT_RUN_HERE, self._lost), None
        self._slot.fault = ""
        try:
            result, fails = self._attempt(plan, work)
            if how := self._fault_in_mps(result):
                return self._without_mps(plan, work, how)
            return result, fails
        finally:
            self._trimmer.after_case()

    def _without_mps(self, plan: Plan, work: Work, how: str) -> tuple[CaseResult | Lost, bool | None]:
        """Run a case again, and all that follow, with a context that no other process can end."""
        item = work.item
        self._slot.leave_mps()
        self.note(f"repeating {item.execution}:{item.case} without MPS")
        if self._diagnosed is not None:
            self._diagnosed.forget(item.backend, item.case)
        result, fails = self._attempt(plan, work)
        return (result if isinstance(result, Lost) else replace(result, repeated=f"{IN_MPS}{how}")), fails

    def _fault_in_mps(self, result: CaseResult | Lost) -> str:
        """Return the end of a worker that shared its GPU by MPS, in words, or the error that the driver gave it: the
        case-run of another lane may be the cause. Empty if there is none.
        """
        if not self._slot.in_mps or isinstance(result, Lost):
            return ""
        if result.status in (Status.CRASHED, Status.TIMED_OUT):
            return result.reason.partition("\n")[0]
        said = (each.headline for each in result.findings if OF_DRIVER.search(each.headline))
        return self._slot.fault or next(said, "")

    def _attempt(self, plan: Plan, work: Work) -> tuple[CaseResult | Lost, bool | None]:
        item = work.item
        try:
            return self._run(plan, work)
        except UsageError as error:
            # It was imported once, to be planned, and cannot be again.
            return bare_result(item, Status.CRASHED, str(error), plan.header.device), None
        except WorkerStartError as error:
            return Lost(str(error)), None
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            return kit_error(item, f"{type(error).__name__}: {error}\n{trace}"), None

    def begin(self, plan: Plan, work: Work) -> None:
        """Accept a case-run, which ``result`` runs; a lane in another process would run it at once."""
        self._begun = plan, work

    def result(self) -> tuple[CaseResult | Lost, bool | None]:
        """Run the case-run of ``begin``, as ``run`` does."""
        assert self._begun is not None
        return self.run(*self._begun)

    def end(self) -> None:
        """Do nothing: ``close`` ends everything at once."""

    def close(self) -> None:
        """End every worker."""
        self._slot.close()

    def _run(self, plan: Plan, work: Work) -> tuple[CaseResult, bool | None]:
        item, slot = work.item, self._slot
        asked = CaseRun(
            item, parse_case(item.case), Execution(item.execution), self._diagnosed, self._options.diagnose_seconds
        )
        candidate = next(each for each in plan.candidates if each.spec == item.backend)
        slot.turn_to(asked.case)
        slot.before, slot.next, slot.printed = None, self._following(work, asked), ""
        try:
            described = slot.take(candidate, plan.device).describe()
            if other_code(plan.header.sources.get(item.backend, {}), described.source):
                raise UsageError(
                    f"{described.source['file']} or a module that it uses has changed since the run was planned: it "
                    "was edited meanwhile, or differs on this machine; run everything again"
                )
            result = evaluate_item(self._noted_drive(item), described, self._to_explain(plan, item), asked)
        except WorkerLost as error:
            result = bare_result(item, error.status, error.reason, plan.header.device)
        else:
            result = replace(result, printed=slot.printed[-MOST_PRINTED:])
            if result.status is Status.CRASHED:
                result = replace(result, reason=result.reason + slot.last_words())
                if self._options.in_process:
                    self._lost = f"not run: the device's context was lost in {item.case}"
        if self._fault_in_mps(result):
            return result, None
        started = time.perf_counter()
        found, fails = self._asked_afresh(result, plan, work.afresh, asked, candidate)
        if self._diagnosed is not None:
            self._diagnosed.settle(shown=fails is not False)
        if "diagnosis" in found.seconds:
            spent = found.seconds["diagnosis"] + time.perf_counter() - started
            found = replace(found, seconds={**found.seconds, "diagnosis": round(spent, 6)})
        return found, fails

    def _noted_drive(self, item: Item) -> Run:
        """Run something in the slot, and note which run of a diagnosis it is: a diagnosis may take as long as ten
        case-runs."""
        count = itertools.count(1)

        def drive(request: RunCase | Rerun) -> RunRecord:
            if isinstance(request, Rerun):
                self.note(f"diagnosing {item.execution}:{item.case}, run {next(count)}")
            return self._slot.drive(request)

        return drive

    def _to_explain(self, plan: Plan, item: Item) -> Plan:
        """The plan, without diagnosis if this failure is not to be diagnosed."""
        if self._options.diagnose != "none" or plan.explains == "nothing":
            return plan
        return replace(plan, explains="check" if item.known else "nothing")

    @staticmethod
    def _following(work: Work, asked: CaseRun) -> RunCase | None:
        after = work.following
        if after is None or after.backend != asked.item.backend:
            return None
        # The worker will have ended (``WorkerSlot.turn_to``).
        if asked.case.inference_mode and not parse_case(after.case).inference_mode:
            return None
        return RunCase(after.case, Execution(after.execution))

    def _asked_afresh(
        self, result: CaseResult, plan: Plan, afresh: Afresh, asked: CaseRun, candidate: Candidate
    ) -> tuple[CaseResult, bool | None]:
        """Record in the result whether an earlier case-run in the same process caused the failure."""
        before = self._slot.before
        if result.status not in (Status.FAILED, Status.CRASHED) or not before or not self._options.asks_afresh:
            return result, None
        if self._options.in_process:
            return replace(result, hints=(*result.hints, _CANNOT_TELL)), None
        if result.like or self._options.diagnose == "none" or not afresh.asks(result):
            return result, None

        def fails_after(before: Sequence[RunCase]) -> bool | None:
            return self._fails_afresh(before, plan, asked, candidate)

        found = explained_by_what_was_kept(result, before, fails_after, search=afresh.searches(result))
        return (result, True) if found is None else (found, False)

    def _fails_afresh(self, before: Sequence[RunCase], plan: Plan, asked: CaseRun, candidate: Candidate) -> bool | None:
        with self._slot.fresh(candidate, plan.device) as worker:
            try:
                described = worker.describe()
                for request in before:
                    self._alive()
                    worker.drive(request)
            except (WorkerLost, UsageError, RuntimeError):
                return None
            self._alive()
            try:
                return fails(worker.drive, described, plan, asked)
            except WorkerLost:
                return True
            except Exception:
                return None


OF_DRIVER = re.compile(
    r"CUDA (driver )?error|sees no CUDA device|CUDA_ERROR|\[CUDA\]|\bMPS\b|\bCU(BLAS|DNN)_STATUS_", re.IGNORECASE
)
"""Errors that a process may get for what another one did, if both are clients of one server of MPS."""

_CANNOT_TELL = (
    "--in-process: the kit cannot find out whether an earlier case-run causes this failure; run without --in-process, "
    "or run only that case"
)
