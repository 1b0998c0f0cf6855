"""The worker of a lane, what it ran before, and what it begins while the lane evaluates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...cases.case import Case, parse_case
from ...contract import Execution
from ...runner_modes.messages import Rerun, RunCase, RunRecord
from ..planning.candidate import Candidate
from ..planning.request import Options
from ..processes.gpus import Gpu
from ..processes.worker_process import Worker, WorkerLost
from .worker_main import LocalWorker


class WorkerSlot:
    """Has at most one worker, for one backend. The worker is replaced if it has ended, or if another backend is next.

    Used by one thread; another may close it.
    """

    def __init__(self, options: Options, gpu: Gpu, alive: Callable[[], None]) -> None:
        """``alive`` is called before everything that may take long in addition to the requested case-run."""
        self._options, self._gpu, self._alive = options, gpu, alive
        self._first = [named_request(name) for name in options.after]
        self._worker: Worker | LocalWorker | None = None
        self._device = "auto"
        self._open: list[Worker | LocalWorker] = []
        """Every worker that has not ended: the lane's, and one that repeats a failure in a fresh process."""
        self._closed = False
        self.next: RunCase | None = None
        """Next case-run of the same backend: the worker begins it while the lane evaluates."""
        self.printed = ""
        """Output that the backend printed in the last case-run."""
        self.before: tuple[RunCase, ...] | None = None
        """History of the worker before the first case that was requested since this attribute was None."""
        self.fault = ""
        """The end of a worker that shared its GPU by MPS, in words, since this was empty."""

    @property
    def in_mps(self) -> bool:
        """True while its workers share a GPU by MPS."""
        return self._gpu.in_mps

    def leave_mps(self) -> None:
        """Have all further workers use the GPU with a context of their own."""
        self._gpu = self._gpu.without_mps()
        self._leave()

    def of(self, candidate: Candidate, device: str) -> Worker | LocalWorker:
        """A live worker of this backend. It imports the backend, and this call does not wait for it."""
        worker = self._worker
        if worker is None or worker.ended or worker.candidate != candidate:
            self._leave()
            self._device = device
            worker = self._worker = self._made(candidate, device, self._gpu)
        return worker

    def take(self, candidate: Candidate, device: str) -> Worker | LocalWorker:
        """A live worker of this backend. It has already run what every new process runs first."""
        worker = self.of(candidate, device)
        for request in () if worker.history else self._first:
            worker.history.append(request)
            self._alive()
            worker.drive(request)
        return worker

    def turn_to(self, case: Case) -> None:
        """End the worker if this case must not follow what it has run. The process would go from inference_mode back to
        no_grad, which no server does: a tensor that a module made in inference_mode and keeps cannot be used under
        no_grad.
        """
        worker = self._worker
        if isinstance(worker, Worker) and not case.inference_mode and any(map(_under_inference_mode, worker.history)):
            worker.close()

    def drive(self, request: RunCase | Rerun) -> RunRecord:
        """Let the backend run something, in a new worker if the previous one has ended. Raises ``WorkerLost``."""
        if isinstance(request, Rerun):
            self._alive()
        worker = self._again()
        self._note(request)
        try:
            answer = worker.drive(request)
        except WorkerLost as error:
            if not error.of_another:
                self._note_fault(error.reason)
                raise
            # The case-run that was begun ahead ended the worker. It is begun again, and reported, in its turn.
            self.next = None
            candidate = worker.candidate
            if self.in_mps:
                self.leave_mps()
            worker = self.take(candidate, self._device)
            self.before = None
            self._note(request)
            answer = worker.drive(request)
        self._note_fault(answer.lost)
        if isinstance(request, RunCase):
            self.printed = worker.printed
        if isinstance(request, RunCase) and self.next is not None:
            worker.ahead(self.next)
            worker.history.append(self.next)
            self.next = None
        return answer

    @contextmanager
    def fresh(self, candidate: Candidate, device: str) -> Iterator[Worker | LocalWorker]:
        """Lend another worker of the backend, which has run nothing, and shares no context with others."""
        worker = self._made(candidate, device, self._gpu.without_mps() if self.in_mps else self._gpu)
        try:
            yield worker
        finally:
            self._end(worker)

    def last_words(self) -> str:
        """Return what the worker printed since it was last asked."""
        return self._worker.last_words() if self._worker else ""

    def close(self) -> None:
        """End every worker, also one that is just starting. Workers that this slot starts later end at once."""
        self._closed = True
        for worker in list(self._open):
            worker.close()

    def _again(self) -> Worker | LocalWorker:
        assert self._worker is not None
        return self.take(self._worker.candidate, self._device)

    def _note_fault(self, how: str) -> None:
        if self.in_mps:
            self.fault = self.fault or how

    def _made(self, candidate: Candidate, device: str, gpu: Gpu) -> Worker | LocalWorker:
        self._alive()
        made: Worker | LocalWorker
        if self._options.in_process:
            made = LocalWorker(candidate, device)
        else:
            # A client that the server of MPS refuses sees no GPU: it must not emulate one.
            named = "cuda" if gpu.in_mps and device == "auto" else device
            made = Worker(candidate, named, self._options.timeout_s, gpu=gpu)
        self._open.append(made)
        if self._closed:  # while it was started
            made.close()
        return made

    def _end(self, worker: Worker | LocalWorker) -> None:
        # Among the open ones until it is gone: who closes the slot meanwhile waits for that.
        worker.close()
        self._open.remove(worker)

    def _leave(self) -> None:
        if self._worker is not None:
            self._end(self._worker)
            self._worker = None

    def _note(self, request: RunCase | Rerun) -> None:
        """Remember what a worker runs, and what it ran before."""
        assert self._worker is not None
        history = self._worker.history
        if not isinstance(request, RunCase):
            return
        # One that was begun ahead is the last of the list already.
        if not (history and history[-1] == request and self.before is None):
            history.append(request)
        if self.before is None:
            self.before = tuple(history[:-1])


def named_request(name: str) -> RunCase:
    """Read the argument of ``repro --after``: ``eager:CASE``."""
    execution, _, case = name.partition(":")
    return RunCase(case, Execution(execution))


def _under_inference_mode(record: RunCase) -> bool:
    return parse_case(record.case).inference_mode
