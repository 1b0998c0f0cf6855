"""One thread's worker: who drives, what it drove before, and what it begins while the judge is busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...cases.case import parse_case
from ...runner_modes.messages import DriveCase, Driven, Rerun
from ..planning.candidate import Candidate
from ..processes.worker_process import Worker, WorkerLost
from .worker_main import LocalWorker

__all__ = ["Place", "Staff", "turns_back"]


class Staff(Protocol):
    """Where workers come from and go to."""

    def worker_for(self, candidate: Candidate, device: str, gpu: str) -> Worker | LocalWorker:
        """One of this backend and GPU that is idle, or a new one."""

    def give_back(self, worker: Worker | LocalWorker | None) -> None:
        """Let others have it."""


class Place:
    """One thread's worker: replaced when it ended, or when another backend is due."""

    def __init__(self, staff: Staff, device: str, gpu: str, first: Sequence[DriveCase] = ()) -> None:
        """``first``: what every worker is to drive before anything else."""
        self._staff, self._device, self.gpu, self._first = staff, device, gpu, first
        self._worker: Worker | LocalWorker | None = None
        self.next: DriveCase | None = None
        """What the same backend is to do after this: begun while the judge is busy."""
        self.before: tuple[DriveCase, ...] | None = None
        """What the worker had driven before the first case that it was asked to drive since this was None."""

    def take(self, candidate: Candidate) -> Worker | LocalWorker:
        """A worker of this backend that lives."""
        worker = self._worker
        if worker is None or worker.ended or worker.candidate != candidate:
            self.leave()
            worker = self._worker = self._staff.worker_for(candidate, self._device, self.gpu)
            self._prepare(worker)
        return worker

    def turn_to(self, case: str) -> None:
        """End the worker where this case must not follow what it has driven."""
        worker = self._worker
        if isinstance(worker, Worker) and any(turns_back(driven.case, case) for driven in worker.history):
            worker.close()

    def _prepare(self, worker: Worker | LocalWorker) -> None:
        """Have it drive what every process is to drive first."""
        for request in () if worker.history else self._first:
            worker.history.append(request)
            worker.drive(request)

    def drive(self, request: DriveCase | Rerun) -> Driven:
        """Have the backend driven, by another worker if the one before has ended. Raises ``WorkerLost``."""
        assert self._worker is not None
        worker = self.take(self._worker.candidate)
        self._note(request)
        try:
            answer = worker.drive(request)
        except WorkerLost as error:
            if not error.of_another:
                raise
            # What was begun ahead took the worker along. It will be begun again, and blamed, in its turn.
            self.next = None
            worker = self.take(self._worker.candidate)
            self.before = None
            self._note(request)
            answer = worker.drive(request)
        if isinstance(request, DriveCase) and self.next is not None:
            worker.ahead(self.next)
            worker.history.append(self.next)
            self.next = None
        return answer

    def _note(self, request: DriveCase | Rerun) -> None:
        """Keep in mind what a worker drives, and what came before."""
        assert self._worker is not None
        history = self._worker.history
        if not isinstance(request, DriveCase):
            return
        # One that was begun ahead is the last of the list already.
        if not (history and history[-1] == request and self.before is None):
            history.append(request)
        if self.before is None:
            self.before = tuple(history[:-1])

    def last_words(self) -> str:
        """What the worker printed since it was last asked."""
        return self._worker.last_words() if self._worker else ""

    def leave(self) -> None:
        """Let others have it."""
        self._staff.give_back(self._worker)
        self._worker = None


def turns_back(before: str, after: str) -> bool:
    """Whether a process would go from inference_mode back to no_grad, which no server does.

    A tensor that a module made under the one and keeps cannot be used under the other.
    """
    return _under_inference_mode(before) and not _under_inference_mode(after)


def _under_inference_mode(case: str) -> bool:
    try:
        return parse_case(case).inference_mode
    except ValueError:
        return False  # the drive will say what is wrong with it
