"""One worker process, seen from the judge: started, asked, timed, and replaced when it dies or hangs."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any, NoReturn

from ..registry import BackendNotFound
from ..results import Status
from ..runner_modes.messages import Copied, Described, DriveCase, Driven, Rerun
from .candidate import Candidate

__all__ = ["STARTED", "Worker", "WorkerLost", "WorkerStartError", "ending", "preload"]

START_SECONDS = 300.0
"""For a worker to import the backend on a busy machine."""
STARTED = "started"
"""What a worker says before it imports its backend."""
LAST_LINES = 12
FRAMES = 5
SERVE = "attn_testkit.running.worker"


class WorkerLost(Exception):
    """The process died or hung over what it was asked. ``status`` is ``CRASHED`` or ``TIMED_OUT``."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class WorkerStartError(Exception):
    """A worker could not be started, and that is no fault of a backend. The message ends with its last words."""


_preloaded = [SERVE, "torch._dynamo"]
"""Modules of the process that workers are forked from: torch and the kit, and no candidate. It never meets CUDA."""


def preload(module: str) -> None:
    """Have workers forked from a process that has imported this too. To be said before the first one starts."""
    if module not in _preloaded:
        _preloaded.append(module)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context


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
        handle, self._words = tempfile.mkstemp(prefix="attn-testkit-worker-")
        os.close(handle)
        self._connection, theirs = multiprocessing.Pipe()
        self._process = _context().Process(
            target=_serve, args=(SERVE, theirs, candidate, device, gpu, timeout_s, self._words), daemon=True
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
                begun = self._wait(START_SECONDS, lambda _: None)
            except WorkerLost as error:
                raise WorkerStartError(f"a worker could not start: {error.reason}") from error
            assert begun == STARTED, begun
            try:
                answer = self._wait(max(START_SECONDS, self._timeout_s), lambda _: None)
            except WorkerLost as error:
                raise BackendNotFound(f"backend {self.candidate.spec!r}: importing it: {error.reason}") from error
            if isinstance(answer, str):
                self.close()
                raise BackendNotFound(answer)
            if not isinstance(answer, Described):
                raise WorkerStartError(f"a worker began with a {type(answer).__name__}{self._last_words()}")
            self.described = answer
        return self.described

    def drive(self, request: DriveCase | Rerun, receive: Callable[[Copied], None]) -> Driven:
        """Have it driven; ``receive`` takes the copies of each step as they come. Raises ``WorkerLost``."""
        self.describe()
        self._mark = os.path.getsize(self._words)
        try:
            self._connection.send(request)
            answer = self._wait(self._timeout_s, receive)
        except OSError:
            self._died()
        except BaseException:
            # What it still sends would be taken for the answer to the next question.
            self.close()
            raise
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

    def _wait(self, seconds: float, receive: Callable[[Copied], None]) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                if not self._connection.poll(max(0.0, left)):
                    raise self._lost(Status.TIMED_OUT, f"no result after {seconds:g} s")
                message = self._connection.recv()
            except (EOFError, OSError):
                self._died()
            if not isinstance(message, Copied):
                return message
            receive(message)

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
