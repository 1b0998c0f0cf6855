"""A process for code that may end or hang it. It answers one question at a time, has a time limit, and ends with
everything that it started."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ...results.case_result import Status
from .forked import Forked
from .forking import fork_context
from .wire import Unreadable, read

START_SECONDS = 300.0
"""Time for a child to import its module on a busy machine."""
_AGAIN_AFTER = (0.1, 1.0)
"""Seconds before the second attempt to start a process, and before the third."""
MOST_BYTES = 1 << 16
"""Most bytes that are kept of a child's output: some print gigabytes."""
LAST_LINES = 12
FRAMES = 5
_UNKNOWN = 255
"""Exit code that ``multiprocessing`` gives if the process that the child was forked from has ended before the child."""
_STARTED = "started"
"""Message that a child sends between importing its module and serving."""


class ChildLost(Exception):
    """The process died or hung. ``status`` is ``CRASHED`` or ``TIMED_OUT``; the reason ends with the last lines that
    the process printed. ``killed``: True if it was killed by SIGKILL, which comes from outside.
    """

    def __init__(self, status: Status, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.killed = status, reason, killed


class Child:
    """A process that imports ``module`` and calls its ``serve(connection, *arguments)``.

    Forked from the process that has imported torch; what it prints goes into a file. ``reader`` makes an object of the
    bytes it sends, or raises ``Unreadable``. ``grace``: seconds that it has after a SIGTERM to end what it started in
    their own groups; 0: it is killed at once. Used by one thread; another may close it. Raises ``OSError`` or
    ``EOFError`` when no process can be started.
    """

    def __init__(self, module: str, *arguments: Any, reader: Callable[[bytes], Any] = read, grace: float = 0.0) -> None:
        self.ended = False
        self._grace = grace
        # Held by a thread whose signal handler may close it again.
        self._closing = threading.RLock()
        self._reader = reader
        self._mark = 0
        self._heard = False
        # The parent process reports how the fork ended, unless the parent is killed first.
        self._forked: Forked | None = None
        self._deadline = self._seconds = 0.0
        handle, self._words = tempfile.mkstemp(prefix="attn-testkit-child-")
        os.close(handle)
        self._connection, theirs = multiprocessing.Pipe()
        self._process = fork_context().Process(target=_run, args=(module, theirs, self._words, arguments), daemon=True)
        try:
            self._start()
        except (OSError, EOFError):
            self.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError, AttributeError):  # it has ended; a system without such files
            self._forked = Forked(self.pid)

    def _start(self) -> None:
        # The process to fork from is replaced when it has ended. One that is killed answers no more, milliseconds
        # before that can be seen.
        for seconds in _AGAIN_AFTER:
            try:
                return self._process.start()
            except (ConnectionError, EOFError):
                time.sleep(seconds)
        self._process.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid or 0

    @property
    def connection(self) -> Connection:
        """Connection of its answers, to wait for those of several children."""
        return self._connection

    @property
    def seconds_left(self) -> float:
        """Seconds until ``answer`` treats the child as hanging."""
        return max(0.0, self._deadline - time.monotonic())

    def wait_until_started(self) -> None:
        """Return when the module is imported. Call it before the first question; raises ``ChildLost``."""
        begun = self.hear(START_SECONDS)
        assert begun == _STARTED, begun

    def ask(self, message: object, seconds: float) -> Any:
        """The answer to a question. Raises ``ChildLost`` if none has come after ``seconds``."""
        self.tell(message, seconds)
        return self.answer()

    def tell(self, message: object, seconds: float) -> None:
        """Ask, and let ``answer`` wait for the answer until ``seconds`` from now."""
        # A process that cannot start prints why. The text may be there before the first question.
        if self._heard:
            self._mark = os.path.getsize(self._words)
        self.wait_for(seconds)
        try:
            self._connection.send(message)
        except OSError:
            self._died()

    def hear(self, seconds: float) -> Any:
        """Receive the child's next message, without a question."""
        self.wait_for(seconds)
        return self.answer()

    def wait_for(self, seconds: float) -> None:
        """Let ``answer`` wait for a message until ``seconds`` from now."""
        self._deadline, self._seconds = time.monotonic() + seconds, seconds

    def answer(self) -> Any:
        """The answer to the last message. Raises ``ChildLost``."""
        try:
            if not self._connection.poll(self.seconds_left):
                raise self._lost(Status.TIMED_OUT, f"no result after {self._seconds:g} s")
            data = self._connection.recv_bytes()
            self._heard = True
            return self._reader(data)
        except (EOFError, OSError):
            self._died()
        except Unreadable as error:
            raise self.spoke_for_itself(str(error)) from error

    def spoke_for_itself(self, what: str) -> ChildLost:
        """The exception to raise if the kit's code in the child did not send the message. Ends the process."""
        return self._lost(Status.CRASHED, f"the process spoke for itself: {what}")

    def printed(self) -> str:
        """Output since the last message to the process, unchanged. If it is long, only its end."""
        return _tail(self._words, self._mark)

    def last_words(self) -> str:
        """The lines that it printed since the last message to it; empty for none."""
        lines = [line.rstrip() for line in _tail(self._words, self._mark).splitlines() if line.strip()]
        return "".join(f"\n  {line}" for line in _last_lines(lines))

    def end(self) -> None:
        """Ask a process with a grace period to end, and do not wait for its end: ``close`` waits."""
        pid = self._process.pid
        if self._grace and pid is not None and self._runs():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        """End the process and everything it started. When this returns, all of them have ended, whichever thread called
        it first."""
        with self._closing:
            if not self.ended:
                self.ended = True
                self._kill()
                self._connection.close()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._words)

    def _kill(self) -> None:
        with self._closing:
            pid = self._process.pid
            if pid is None or not self._runs():
                return
            if self._grace:
                self.end()
                self._wait(self._grace)
            # Its own group where it came so far, and itself where not.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
            self._wait()

    def _runs(self) -> bool:
        return self._process.exitcode is None if self._forked is None else self._forked.poll() is None

    def _wait(self, seconds: float | None = None) -> None:
        if self._forked is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._forked.wait(seconds)
            if self._runs():
                return
        self._process.join(seconds)

    def _died(self) -> NoReturn:
        self._process.join(timeout=5)
        code = self._process.exitcode
        how = "closed its pipe" if code is None else ending(code)
        if code == _UNKNOWN:
            how = "ended, with exit code 255 or an unknown one"
        raise self._lost(Status.CRASHED, f"the process {how}", killed=code == -signal.SIGKILL)

    def _lost(self, status: Status, reason: str, *, killed: bool = False) -> ChildLost:
        self._kill()
        words = self.last_words()
        self.close()
        return ChildLost(status, reason + words, killed=killed)


def _run(module: str, connection: Connection, words: str, arguments: tuple[Any, ...]) -> None:
    # Its own group: Ctrl-C reaches only the front end, and processes that the child starts end with it.
    os.setsid()
    gc.enable()  # the process that it is forked from imports without
    output = os.open(words, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The judge's arguments and environment would show a backend what is asked: both have the judge's search path.
    sys.argv[:], sys.orig_argv[:] = [""], [sys.executable]
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.enable(all_threads=False)
    # In the process that children are forked from it may be imported already.
    serve = importlib.import_module(module).serve
    connection.send(_STARTED)
    serve(connection, *arguments)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _tail(path: str, start: int) -> str:
    """The contents of a file from ``start`` on; only the end if there is too much of it."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.path.getsize(path) - MOST_BYTES))
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _last_lines(lines: list[str]) -> list[str]:
    """The last lines. Of Python's own stack dump only the innermost frames of the thread that matters are kept.

    Printed tracebacks lose the lines that an author cannot fix: frames of the kit, and carets.
    """
    lines = _without_machinery(lines)
    stacks = [i for i, line in enumerate(lines) if "most recent call first" in line]
    if not stacks:
        return lines[-LAST_LINES:]
    # A fatal error marks the thread it happened in; a dump on a timer does not, and has the main thread last.
    stack = next((i for i in stacks if lines[i].startswith("Current thread")), stacks[-1])
    before = [line for line in lines[: stacks[0]] if not line.startswith("Timeout (")]
    frames = [line for line in lines[stack + 1 :] if line.startswith("  File")][:FRAMES]
    return before[-(LAST_LINES - len(frames)) :] + frames


def _without_machinery(lines: list[str]) -> list[str]:
    kept: list[str] = []
    passed_over = False
    for line in lines:
        if line.startswith("  File "):
            passed_over = bool(_MACHINERY.search(line))
        elif not line.startswith("    "):
            passed_over = False
        if not passed_over and line.strip(" ^~") and not re.fullmatch(r"Process \S+:", line):
            kept.append(line)
    return kept


_MACHINERY = re.compile(
    r"/attn_testkit/(running|graphs|checks|runner_modes|model\.py|environment\.py|registry\.py)"
    r'|/cuda_on_cpu/\w+\.py"|/runner_modes/\w+\.py"|/multiprocessing/|/importlib/|"<(string|frozen )'
)
"""Files whose frames do not help the author of a backend."""


def ending(code: int) -> str:
    """Describe how a process ended, from its exit code as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
