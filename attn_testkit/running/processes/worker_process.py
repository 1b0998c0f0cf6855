"""One worker process, as the judge uses it. It is started, asked, timed, and replaced if it dies or hangs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from ...checks import Stage
from ...registry import BackendNotFound
from ...results.case_result import Status
from ...runner_modes.messages import Described, Rerun, RunCase, RunRecord
from ..planning.candidate import Candidate
from . import forking
from .child import Child, ChildLost
from .gpus import ANY_GPU, Gpu

_IMPORT_SECONDS = 60.0
"""Least time limit of a backend's import: packages are large, disks cold and machines busy."""


_STAGES = frozenset(map(int, Stage))


def import_seconds(timeout_s: float) -> float:
    """Time limit of a backend's import: that of a case-run, and at least ``_IMPORT_SECONDS``."""
    return max(_IMPORT_SECONDS, timeout_s)


class WorkerLost(Exception):
    """The process died or hung while it answered a request. ``status`` is ``CRASHED`` or ``TIMED_OUT``. ``of_another``:
    it did so in a case-run that was begun ahead, not in this request.
    """

    def __init__(self, status: Status, reason: str, *, of_another: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.of_another = status, reason, of_another


class ImportKilled(BackendNotFound):
    """The process was killed by SIGKILL while it imported the backend. The signal came from outside, so another process
    may succeed."""


class WorkerStartError(Exception):
    """A worker could not be started, which is not the fault of a backend. The message ends with its last output."""


class Worker:
    """A process for one backend, and never for a second one. It starts importing at once, and answers one question at a
    time.

    Used by one thread.
    """

    def __init__(self, candidate: Candidate, device: str, timeout_s: float, *, gpu: Gpu = ANY_GPU) -> None:
        self.candidate, self.gpu = candidate, gpu
        self.described: Described | None = None
        self.history: list[RunCase] = []
        """Case-runs that it has run or was asked to run."""
        self._timeout_s = timeout_s
        self._ahead: RunCase | Rerun | None = None
        self._number = 0
        self._kept: dict[RunCase | Rerun, tuple[RunRecord | str, str]] = {}
        self.printed = ""
        """Output that the process printed in its last run."""
        try:
            self._child = Child(forking.SERVE, candidate, device, gpu.variables, timeout_s, import_seconds(timeout_s))
        except (OSError, EOFError) as error:
            raise WorkerStartError(f"no process could be started: {error}") from error

    @property
    def ended(self) -> bool:
        """True if the process is gone and another worker is needed."""
        return self._child.ended

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._child.pid

    def describe(self) -> Described:
        """Capabilities of the backend. Raises ``BackendNotFound`` if importing it fails, kills the process, or
        hangs."""
        if self.described is None:
            try:
                self._child.wait_until_started()
            except ChildLost as error:
                raise WorkerStartError(f"a worker could not start: {error.reason}") from error
            try:
                answer = self._child.hear(import_seconds(self._timeout_s))
            except ChildLost as error:
                lost = ImportKilled if error.killed else BackendNotFound
                raise lost(f"backend {self.candidate.spec!r}: importing it: {error.reason}") from error
            if isinstance(answer, str):
                self.close()
                raise BackendNotFound(answer)
            if not isinstance(answer, Described):
                raise WorkerStartError(f"the first message of a worker is a {type(answer).__name__}{self.last_words()}")
            self.described = answer
        return self.described

    def drive(self, request: RunCase | Rerun) -> RunRecord:
        """Run a case or a rerun in the worker. Raises ``WorkerLost``, and ``RuntimeError`` if the harness itself
        failed."""
        self.describe()
        if self._ahead is not None and self._ahead != request:
            # Asked between: what was begun is kept for when it is asked for.
            begun, self._ahead = self._ahead, None
            with _lost(of_another=True):
                answer = self._answer()
                self._kept[begun] = answer, self.printed
        if request in self._kept:
            answer, self.printed = self._kept.pop(request)
            return self._evaluated(answer)
        with _lost():
            if self._ahead is None:
                self._tell(request)
            self._ahead = None
            return self._evaluated(self._answer())

    def ahead(self, request: RunCase) -> None:
        """Begin the next case-run while the lane evaluates this one."""
        if not self.ended and self._ahead is None:
            self._ahead = request
            with contextlib.suppress(ChildLost):  # it is raised when the answer is asked for
                self._tell(request)

    def _tell(self, request: RunCase | Rerun) -> None:
        # A number that nobody can predict: an answer to another question is noticed.
        self._number = secrets.randbits(63)
        self._child.tell((self._number, request), self._timeout_s)

    def _answer(self) -> Any:
        message = self._child.answer()
        self.printed = self._child.printed()
        if not isinstance(message, tuple) or len(message) != 2:
            raise self._child.spoke_for_itself(f"it sent a {type(message).__name__}, which is not an answer")
        number, answer = message
        if number != self._number:
            raise self._child.spoke_for_itself("it sent an answer to another question")
        return answer

    def _evaluated(self, answer: Any) -> RunRecord:
        if isinstance(answer, RunRecord) and answer.stage not in _STAGES:
            raise self._child.spoke_for_itself(f"it sent a run record with the unknown stage {answer.stage!r}")
        if isinstance(answer, RunRecord):
            # A lost device context outlives the case-run; the next one needs a fresh process.
            if answer.lost:
                self.close()
            return answer
        raise RuntimeError(f"the worker failed: {answer}{self.last_words()}")

    def last_words(self) -> str:
        """Output since the last question: a device-side assertion reports its reason only there."""
        return self._child.last_words()

    def close(self) -> None:
        """End the process and everything it started."""
        self._child.close()


@contextlib.contextmanager
def _lost(*, of_another: bool = False) -> Iterator[None]:
    """Convert a ``ChildLost`` inside into a ``WorkerLost``."""
    try:
        yield
    except ChildLost as error:
        raise WorkerLost(error.status, error.reason, of_another=of_another) from error
