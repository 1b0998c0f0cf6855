"""The only loop over case-runs: items in, results out, whatever the backends do. No printing, no pytest.

Each thread has at most one worker, and a worker has one backend for all its life. A thread sends what is to be driven,
takes the copies, judges them or has them judged, and asks further where something is wrong.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from ...cases.case import parse_case
from ...contract import Capabilities, Execution
from ...environment import resolve
from ...registry import UsageError, capabilities_line
from ...results import CaseResult, Status
from ...runner_modes.messages import Described, DriveCase
from ..planning.candidate import Candidate
from ..planning.plan import plan_run
from ..planning.request import Item, Options, Plan, Request, bare_result, kit_error, not_started
from ..processes.exits import refuse_success_by_exit
from ..processes.host_memory import Trimmer
from ..processes.merging import merged
from ..processes.worker_process import Worker, WorkerLost, WorkerStartError
from .between_cases import explained_by_what_was_kept
from .judge import fails, judge_item
from .judging_process import JudgingProcess
from .place import Place, turns_back
from .worker_main import LocalWorker

__all__ = ["JUDGED_HERE", "Runner"]

_Group = deque[Item]


class Runner:
    """Plans and runs in this process; backends run in processes of their own, unless ``options.in_process``."""

    def __init__(self, options: Options | None = None, *, judges_beside: bool = False) -> None:
        """``judges_beside``: a process judges beside each worker, however few there are."""
        self.options = options or Options()
        self._beside = judges_beside
        self._judging: list[JudgingProcess] = []
        if self.options.in_process:
            refuse_success_by_exit()
        self._described: dict[Candidate, Described] = {}
        self._idle: list[Worker | LocalWorker] = []
        self._busy: set[Worker | LocalWorker] = set()
        # A signal may come while this very thread holds it, and its handler closes everything.
        self._lock = threading.RLock()
        self._trimmer = Trimmer()
        self._begun = time.monotonic()
        self._closed = False
        self._wrong_afresh: Counter[tuple[str, ...]] = Counter()
        """Kind of failure -> how often it was found in a fresh process too."""
        self._right_afresh: Counter[str] = Counter()
        """Backend -> failures that were not."""
        self._lost = ""
        """In this process: which case-run lost the device's context."""

    def plan(self, request: Request) -> Plan:
        """Decide what to run. Imports every backend, in a process each. Raises ``UsageError``."""
        resolve(request.device).prepare_process()
        for name in self.options.after:
            try:
                parse_case(_named_request(name).case)
            except ValueError as error:
                raise UsageError(f"--after: {error}") from None
        return plan_run(
            request,
            lambda candidate: self._claims_for(candidate, request),
            lambda candidate: dict(self._described[candidate].broken_packages),
            lambda candidate: self._described[candidate].notes,
        )

    def _claims_for(self, candidate: Candidate, request: Request) -> Capabilities:
        """What it claims. The other workers that the run will want import it while the plan is made."""
        claims = self.claims(candidate, request.device)
        alone = len(request.candidates) == 1 and not request.cases
        for index in range(1, self.options.jobs) if alone and not self.options.in_process else ():
            try:
                worker = Worker(candidate, request.device, self.options.timeout_s, gpu=self._gpu(index))
            except WorkerStartError:
                break  # the run will ask for one again, and say what is in the way
            with self._lock:
                self._idle.append(worker)
        return claims

    def claims(self, candidate: Candidate, device: str) -> Capabilities:
        """What a backend claims. Raises ``UsageError`` where it cannot be imported."""
        if candidate not in self._described:
            worker = self.worker_for(candidate, device, self._gpu(0))
            try:
                self._described[candidate] = worker.describe()
            finally:
                self.give_back(worker)
        return self._described[candidate].claims

    def claims_lines(self, specs: Sequence[str], device: str) -> list[tuple[str, str]]:
        """(what it claims in one line, why it cannot be imported) of each, one of them empty."""
        found = []
        resolve(device).prepare_process()
        for spec in specs:
            try:
                found.append((capabilities_line(self.claims(Candidate(spec), device)), ""))
            except UsageError as error:
                found.append(("", str(error)))
        return found

    def run(self, plan: Plan, items: Sequence[Item], *, ahead: bool = True) -> Generator[CaseResult, None, None]:
        """Results as they come, one for each item. Closing the generator ends what is running.

        ``ahead``: whether a worker begins its next case-run while the one before is judged.
        """
        waiting = deque(_groups(items))
        jobs = 1 if self.options.in_process else max(1, min(self.options.jobs, len(waiting)))
        if jobs > 1:
            yield from self._run_threads(plan, waiting, jobs, ahead)
            return
        with contextlib.closing(self._results(plan, waiting, 0, jobs, ahead, threading.Event())) as results:
            yield from results

    def close(self) -> None:
        """End every worker, and every process that judges and is idle."""
        self._closed = True
        with self._lock:
            workers = [*self._idle, *self._busy]
            self._idle.clear()
        for worker in workers:
            worker.close()
        while self._judging:
            self._judging.pop().close()

    def _run_threads(
        self, plan: Plan, waiting: deque[_Group], jobs: int, ahead: bool
    ) -> Generator[CaseResult, None, None]:
        ended = threading.Event()

        def give_up() -> None:
            # Nobody is to begin anything new, and a thread that waits for its worker is let go by its end.
            ended.set()
            self.close()
            self._closed = False

        yield from merged([self._results(plan, waiting, i, jobs, ahead, ended) for i in range(jobs)], give_up)

    def _results(
        self, plan: Plan, waiting: deque[_Group], index: int, jobs: int, ahead: bool, ended: threading.Event
    ) -> Generator[CaseResult, None, None]:
        """What one thread of ``jobs`` does, until ``ended`` is set."""
        candidates = {candidate.spec: candidate for candidate in plan.candidates}
        place = Place(self, plan.device, self._gpu(index), [_named_request(name) for name in self.options.after])
        judging = self._judging_process() if self._beside or jobs > JUDGED_HERE else None
        try:
            for item, after in _with_next(waiting, jobs):
                if self._closed or ended.is_set():
                    return
                if self._budget_is_over():
                    assert self.options.budget_s is not None
                    yield not_started(item, self.options.budget_s)
                    continue
                same = after is not None and after.backend == item.backend and not turns_back(item.case, after.case)
                place.next = _request(after) if after and same and ahead else None
                yield self._result(item, plan, place, candidates[item.backend], judging)
                self._trimmer.after_case()
        finally:
            place.leave()
            if judging is not None and not self._closed and not ended.is_set():
                self._judging.append(judging)
            elif judging is not None:
                judging.close()

    def _budget_is_over(self) -> bool:
        return self.options.budget_s is not None and time.monotonic() - self._begun >= self.options.budget_s

    def _judging_process(self) -> JudgingProcess:
        """One that is idle: it knows the answers to what it has judged."""
        try:
            return self._judging.pop()
        except IndexError:
            return JudgingProcess()

    def _result(
        self, item: Item, plan: Plan, place: Place, candidate: Candidate, judging: JudgingProcess | None
    ) -> CaseResult:
        """One case-run. Whatever the backend or the kit does, this returns."""
        if self._lost:
            return bare_result(item, Status.NOT_RUN_HERE, self._lost)
        device = plan.header.device
        place.before = None
        try:
            place.turn_to(item.case)
            described = place.take(candidate).describe()
            if judging is not None:
                result = judging.judge(place.drive, described, plan, item)
            else:
                result = judge_item(place.drive, described, plan, item)
        except WorkerLost as error:
            result = bare_result(item, error.status, error.reason, device)
            return self._asked_afresh(result, item, plan, place, candidate)
        except UsageError as error:
            # It was imported once, to be planned, and cannot be again.
            return bare_result(item, Status.CRASHED, str(error), device)
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            return kit_error(item, f"{type(error).__name__}: {error}\n{trace}")
        if result.status is Status.CRASHED:
            result = replace(result, reason=result.reason + place.last_words())
            if self.options.in_process:
                self._lost = f"not run: the device's context was lost in {item.case}"
        return self._asked_afresh(result, item, plan, place, candidate)

    def _asked_afresh(
        self, result: CaseResult, item: Item, plan: Plan, place: Place, candidate: Candidate
    ) -> CaseResult:
        """The result, and whether an earlier case-run in the same process is the cause of a failure."""
        if result.status not in (Status.FAILED, Status.CRASHED) or not place.before or not self.options.asks_afresh:
            return result
        if self.options.in_process:
            return replace(result, hints=(*result.hints, _CANNOT_TELL))
        kind = (item.backend, *(finding.check for finding in result.findings))
        if self._wrong_afresh[kind] >= _ENOUGH:
            return result

        def fails_after(before: Sequence[DriveCase]) -> bool | None:
            return self._fails_afresh(before, item, plan, place, candidate)

        search = self._right_afresh[item.backend] < _ENOUGH
        found = explained_by_what_was_kept(result, place.before, fails_after, search=search)
        if found is None:
            self._wrong_afresh[kind] += 1
            return result
        self._right_afresh[item.backend] += 1
        return found

    def _fails_afresh(
        self, before: Sequence[DriveCase], item: Item, plan: Plan, place: Place, candidate: Candidate
    ) -> bool | None:
        worker = Worker(candidate, plan.device, self.options.timeout_s, gpu=place.gpu)
        self._begin(worker)
        try:
            described = worker.describe()
            for request in before:
                worker.drive(request)
        except (WorkerLost, UsageError, RuntimeError):
            self._end(worker)
            return None
        try:
            return fails(worker.drive, described, plan, item)
        except WorkerLost:
            return True
        except Exception:
            return None
        finally:
            self._end(worker)

    def _begin(self, worker: Worker | LocalWorker) -> None:
        with self._lock:
            self._busy.add(worker)
        if self._closed:  # while it was started
            worker.close()

    def _end(self, worker: Worker | LocalWorker) -> None:
        worker.close()
        with self._lock:
            self._busy.discard(worker)

    def worker_for(self, candidate: Candidate, device: str, gpu: str) -> Worker | LocalWorker:
        """An idle worker of the same backend and GPU, else a new one in the place of an idle one of another."""
        with self._lock:
            fits = [w for w in self._idle if w.candidate == candidate and getattr(w, "gpu", gpu) == gpu and not w.ended]
            if fits:
                self._idle.remove(fits[0])
                self._busy.add(fits[0])
                return fits[0]
            spare, self._idle = self._idle, []
        for worker in spare:
            worker.close()
        made: Worker | LocalWorker
        if self.options.in_process:
            made = LocalWorker(candidate, device)
        else:
            made = Worker(candidate, device, self.options.timeout_s, gpu=gpu)
        self._begin(made)
        return made

    def give_back(self, worker: Worker | LocalWorker | None) -> None:
        """Let others have it."""
        if worker is None:
            return
        with self._lock:
            if not worker.ended and not self._closed:
                self._busy.discard(worker)
                self._idle.append(worker)
                return
        # Among the busy until it is gone: who closes the runner meanwhile waits for that.
        self._end(worker)

    def _gpu(self, index: int) -> str:
        gpus = self.options.gpus
        return gpus[index % len(gpus)] if gpus else ""


JUDGED_HERE = 2
"""Workers up to which this process judges; of more, each has a process that judges beside it."""
_ENOUGH = 2
"""Failures of one kind, the same checks, that are asked about in a fresh process: it takes as long as a worker's start.
Later ones are taken to be like them."""
_CANNOT_TELL = (
    "--in-process: whether a failure has its cause in an earlier case-run cannot be told; run without it, or that case "
    "alone"
)


def _request(item: Item) -> DriveCase:
    return DriveCase(item.case, Execution(item.execution))


def _named_request(name: str) -> DriveCase:
    execution, _, case = name.partition(":")
    return DriveCase(case, Execution(execution))


def _with_next(waiting: deque[_Group], threads: int) -> Iterator[tuple[Item, Item | None]]:
    """What one of the threads is to do, each item with the one that comes after it as far as that is known.

    A thread takes its next group while it is busy with the last item of one, so that its worker need not wait. Not
    where few are left: another thread may be free sooner.
    """
    group = _taken(waiting)
    while group:
        item = group.popleft()
        if not group and (threads == 1 or len(waiting) > threads):
            group = _taken(waiting)
        yield item, group[0] if group else None
        if not group:
            group = _taken(waiting)


def _taken(waiting: deque[_Group]) -> _Group:
    try:
        return waiting.popleft()
    except IndexError:
        return deque()


def _groups(items: Sequence[Item]) -> list[_Group]:
    """Neighbours that share a case, eager and graph, go to the same worker: they share data and the oracle's answer."""
    groups: list[_Group] = []
    last = None
    for item in items:
        key = (item.backend, item.case)
        if key != last:
            groups.append(deque())
        groups[-1].append(item)
        last = key
    return groups
