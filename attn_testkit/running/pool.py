"""One worker process, seen from the judge: started, asked, timed, and replaced when it dies or hangs."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from typing import Any, NoReturn

from ..registry import BackendNotFound
from ..results import Status
from ..runner_modes.messages import Described, DriveCase, Driven, Rerun
from . import forking
from .candidate import Candidate
from .forking import fork_context
from .wire import Unreadable, read

__all__ = ["STARTED", "Worker", "WorkerLost", "WorkerStartError", "ending"]

START_SECONDS = 300.0
"""For a worker to import the backend on a busy machine."""
STARTED = "started"
"""What a worker says before it imports its backend."""
LAST_LINES = 12
FRAMES = 5


class WorkerLost(Exception):
    """The process died or hung over what it was asked. ``status`` is ``CRASHED`` or ``TIMED_OUT``.

    ``of_another``: over a drive that was begun ahead, and not over this request.
    """

    def __init__(self, status: Status, reason: str, *, of_another: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.of_another = status, reason, of_another


class WorkerStartError(Exception):
    """A worker could not be started, and that is no fault of a backend. The message ends with its last words."""


class Worker:
    """A process for one backend, and never for a second one. Starts importing at once; answers one question at a time.

    Used by one thread.
    """

    def __init__(self, candidate: Candidate, device: str, timeout_s: float, *, gpu: str = "") -> None:
        self.candidate, self.gpu = candidate, gpu
        self.ended = False
        self.described: Described | None = None
        self._timeout_s = timeout_s
        self._mark = 0
        self._deadline = 0.0
        self._ahead: DriveCase | Rerun | None = None
        self._kept: dict[DriveCase | Rerun, Driven | str] = {}
        handle, self._words = tempfile.mkstemp(prefix="attn-testkit-worker-")
        os.close(handle)
        self._connection, theirs = multiprocessing.Pipe()
        self._process = fork_context().Process(
            target=_serve, args=(forking.SERVE, theirs, candidate, device, gpu, timeout_s, self._words), daemon=True
        )
        try:
            self._process.start()
        except (OSError, EOFError) as error:
            self.close()
            raise WorkerStartError(f"no process could be started: {error}") from error
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    def describe(self) -> Described:
        """What the backend claims. Raises ``BackendNotFound`` when importing it fails, kills the process, or hangs."""
        if self.described is None:
            try:
                begun = self._wait(time.monotonic() + START_SECONDS, START_SECONDS)
            except WorkerLost as error:
                raise WorkerStartError(f"a worker could not start: {error.reason}") from error
            assert begun == STARTED, begun
            try:
                patience = max(START_SECONDS, self._timeout_s)
                answer = self._wait(time.monotonic() + patience, patience)
            except WorkerLost as error:
                raise BackendNotFound(f"backend {self.candidate.spec!r}: importing it: {error.reason}") from error
            if isinstance(answer, str):
                self.close()
                raise BackendNotFound(answer)
            if not isinstance(answer, Described):
                raise WorkerStartError(f"a worker began with a {type(answer).__name__}{self._last_words()}")
            self.described = answer
        return self.described

    def drive(self, request: DriveCase | Rerun) -> Driven:
        """Have it driven. Raises ``WorkerLost``, and ``RuntimeError`` when the harness itself failed there."""
        self.describe()
        if self._ahead is not None and self._ahead != request:
            # Asked between: what was begun is kept for when it is asked for.
            begun, self._ahead = self._ahead, None
            try:
                self._kept[begun] = self._answer()
            except WorkerLost as error:
                raise WorkerLost(error.status, error.reason, of_another=True) from error
        if request in self._kept:
            return self._judged(self._kept.pop(request))
        if self._ahead is None:
            self._send(request)
        self._ahead = None
        return self._judged(self._answer())

    def ahead(self, request: DriveCase) -> None:
        """Begin a drive that is asked for next, while the judge is busy with the one before."""
        if not self.ended and self._ahead is None:
            self._ahead = request
            with contextlib.suppress(WorkerLost):  # it is raised when the answer is asked for
                self._send(request)

    def _send(self, request: DriveCase | Rerun) -> None:
        self._mark = os.path.getsize(self._words)
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._connection.send(request)
        except OSError:
            self._died()

    def _answer(self) -> Driven | str:
        answer: Driven | str = self._wait(self._deadline, self._timeout_s)
        return answer

    def _judged(self, answer: Driven | str) -> Driven:
        if isinstance(answer, Driven):
            # A lost device context outlives the case-run; the next one needs a fresh process.
            if answer.lost:
                self.close()
            return answer
        raise RuntimeError(f"the worker failed: {answer}{self._last_words()}")

    def last_words(self) -> str:
        """What it printed since it was last asked: a device-side assertion says what failed there, and only there."""
        return self._last_words()

    def close(self) -> None:
        """End the process and everything it started."""
        if not self.ended:
            self.ended = True
            self._kill()
            self._connection.close()

    def _kill(self) -> None:
        pid = self._process.pid
        if pid is not None and self._process.exitcode is None:
            # Its own group where it came so far, and itself where not.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
            self._process.join()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._words)

    def _wait(self, deadline: float, seconds: float) -> Any:
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._lost(Status.TIMED_OUT, f"no result after {seconds:g} s")
            return read(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._died()
        except Unreadable as error:
            raise self._lost(Status.CRASHED, f"the process of the backend spoke for itself: {error}") from error

    def _died(self) -> NoReturn:
        self._process.join(timeout=5)
        code = self._process.exitcode
        raise self._lost(Status.CRASHED, f"the process {ending(code) if code is not None else 'closed its pipe'}")

    def _lost(self, status: Status, reason: str) -> WorkerLost:
        self._kill()
        words = self._last_words()
        self.close()
        return WorkerLost(status, reason + words)

    def _last_words(self) -> str:
        try:
            with open(self._words, "rb") as file:
                file.seek(self._mark)
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return "".join(f"\n  {line}" for line in _last_lines(lines))


def _serve(module: str, *args: Any) -> None:
    # In the process that workers are forked from it is imported already.
    importlib.import_module(module).serve(*args)


def _last_lines(lines: list[str]) -> list[str]:
    """The last lines, with of Python's own stack dump only the innermost frames of the thread that matters."""
    stacks = [i for i, line in enumerate(lines) if "most recent call first" in line]
    if not stacks:
        return lines[-LAST_LINES:]
    # A fatal error marks the thread it happened in; a dump on a timer does not, and has the main thread last.
    stack = next((i for i in stacks if lines[i].startswith("Current thread")), stacks[-1])
    before = [line for line in lines[: stacks[0]] if not line.startswith("Timeout (")]
    frames = [line for line in lines[stack + 1 :] if line.startswith("  File") and not _of_the_worker(line)]
    frames = frames[:FRAMES]
    return before[-(LAST_LINES - len(frames)) :] + frames


def _of_the_worker(line: str) -> bool:
    return "attn_testkit/running/" in line or '"<string>"' in line or "/multiprocessing/" in line


def ending(code: int) -> str:
    """How a process came to its end, in words, from its exit code as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
