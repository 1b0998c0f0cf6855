"""The judge in its own process. Every front end uses it.

The judge must not share a process with the backend: one assignment at import could make any backend conformant. So
pytest, a notebook and the command line start a fresh interpreter for the judge. It imports no candidate; the workers
that it starts do. A front end needs no torch. A judge that dies is replaced. The front end holds the plan and the
results so far, so another judge can continue.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, NoReturn

from ...registry import UsageError
from ...results.case_result import CaseResult
from ..planning.request import Item, Judge, Options, Plan, Request, once_more
from . import judge_of_worker
from .child import ending
from .forked import Forked
from .forking import fork_off
from .gpus import visible_gpus

if TYPE_CHECKING:
    from ...contract import Capabilities
    from ..planning.candidate import Candidate

_LOOP = "attn_testkit.running.case_runs.loop"
RUNNER = _LOOP
"""Module whose ``Runner`` the judge uses."""

# The child has the parent's sys.path before it imports anything: a backend may be anywhere on that path.
# It imports without the garbage collector, which would look at all of torch a dozen times: a quarter of the time.
_BOOT = (
    "import gc; gc.disable(); import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from attn_testkit.running.processes.judge_process import _serve; _serve()"
)
_PATIENCE = 10.0
"""Seconds for the judge to end its workers before it is killed."""
MOST_DEATHS = 10
"""Number of successive deaths of the process, with no answer and no result between them, that ends the run."""


class JudgeError(Exception):
    """The judge failed: a fault of the kit or of the installation, never a verdict. The message ends with what the
    judge printed."""


class _Died(Exception):
    """The judge's process has ended. The text says how."""


class JudgeProcess:
    """A ``request.Judge`` at the other end of a pipe, replaced when it dies. Used by one thread."""

    def __init__(self, options: Options | None = None, device: str = "auto", *, place: str = "") -> None:
        """``device``: the device of the run, if it is known. ``place``: the socket of a judge that was forked for this
        process (``for_worker``). Without one, or if that judge has ended, a fresh interpreter is started.
        """
        self._process: subprocess.Popen[bytes] | Forked
        self._options, self._device = options or Options(), device
        self._began = time.monotonic()
        self._deaths = 0
        self._closed = False
        forked = judge_of_worker.connect(place, search_path(), _environment(device)) if place else None
        self._connection, self._process = forked or _fresh(device)
        self.note: Callable[[str], None] = lambda text: None
        """Called with a text about what happens between two results."""
        self._begin(self._options)

    def plan(self, request: Request) -> Plan:
        """Decide what to run. Raises ``UsageError``."""
        plan: Plan = self._ask("plan", request)
        return plan

    def capabilities_lines(self, specs: Sequence[str], device: str) -> list[tuple[str, str]]:
        """Pairs for each backend: one line with what it declares, and the reason why it cannot be imported. One of the
        two is empty."""
        lines: list[tuple[str, str]] = self._ask("declared", tuple(specs), device)
        return lines

    def capabilities(self, candidate: Candidate, device: str) -> Capabilities:
        """Capabilities of a backend. Imports torch here, as their values need it. Raises ``UsageError``."""
        declared: Capabilities = self._ask("capabilities", candidate, device)
        return declared

    def device_name(self, device: str) -> str:
        """Name of the device that a run would use here."""
        name: str = self._ask("device", device)
        return name

    def for_worker(self) -> str:
        """Let a judge be forked for another front end. Returns its ``place``, or empty text. That judge ends with this
        one."""
        if RUNNER != _LOOP:
            return ""  # what is forked has imported that one
        place: str = self._ask("fork")
        return place

    def run(self, plan: Plan, items: Sequence[Item]) -> Generator[CaseResult, None, None]:
        """Results as they come, one for each item. If the caller stops reading before the end, the judge ends. If a
        judge dies, another one continues, and repeats the case-runs that were running once.
        """
        left = list(items)
        running: list[Item] = []
        done = False
        try:
            while not done:
                try:
                    self._send(("run", plan, tuple(left)))
                    while (found := self._receive("result", running)) is not None:
                        _strike(left, found)
                        _strike(running, found)
                        yield found
                    done = True
                except _Died as died:
                    yield from _with_once_more(left, running, str(died))
                    self._replace(died)
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """End the judge and all of its workers."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        self._connection.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _begin(self, options: Options) -> None:
        # A judge that has died by now is noticed when it is asked.
        with contextlib.suppress(OSError):
            self._connection.send(options)

    def _replace(self, died: _Died) -> None:
        """Start another judge. Raises ``JudgeError`` if the judge died too often."""
        self._deaths += 1
        if self._closed:
            raise JudgeError(f"{died}; its output is printed above") from died
        if self._deaths >= MOST_DEATHS:
            self.close()
            raise JudgeError(
                f"{died}, as {self._deaths - 1} before it did, without a result between; their output is printed above"
            ) from died
        self.note(f"{died}; another one is starting")
        try:
            self._connection, self._process = _fresh(self._device)
        except OSError as error:
            self.close()
            raise JudgeError(f"{died}, and no other could be started: {error}") from error
        self._begin(replace(self._options, spent_s=time.monotonic() - self._began))

    def _ask(self, kind: str, *values: object) -> Any:
        """The answer to a question, from another judge if the first one dies."""
        while True:
            try:
                self._send((kind, *values))
                return self._receive(kind)
            except _Died as died:
                self._replace(died)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._ended() from error

    def _receive(self, kind: str, running: list[Item] | None = None) -> Any:
        """Receive an answer. ``running``: receives the case-runs that begin before the answer."""
        try:
            found, value = self._connection.recv()
            while found in ("note", "begun"):
                if found == "note":
                    self.note(value)
                elif running is not None:
                    running.append(value)
                found, value = self._connection.recv()
        except TimeoutError:
            # An alarm of the caller's: the judge has not ended.
            raise
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self._deaths = 0
        if found == "usage":
            raise UsageError(value)
        if found != kind:
            raise JudgeError(value)
        return value

    def _ended(self) -> _Died:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._end()
        code = self._process.returncode
        if code is None or code >= 0:
            return _Died("the judge's process ended" + ("" if code is None else f" with exit code {code}"))
        return _Died(f"the judge's process {ending(code)}")


def _strike(items: list[Item], result: CaseResult) -> None:
    """Remove the item of this result."""
    for number, item in enumerate(items):
        if item.key == result.key:
            del items[number]
            return


def _with_once_more(left: list[Item], running: list[Item], how: str) -> Iterator[CaseResult]:
    """Add the case-runs that were running when the judge died to the remaining ones, to repeat them. Yield the results
    that came before."""
    lost = {item.key: item for item in running}
    running.clear()
    for number, item in reversed([*enumerate(left)]):
        if item.key in lost:
            again = once_more(lost[item.key], how)
            if isinstance(again, Item):
                left[number] = again
            else:
                del left[number]
                yield replace(again, repeated=lost[item.key].lost)


def _fresh(device: str) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start the judge in a fresh interpreter; returns a pipe to it, and its process."""
    connection, theirs = Pipe()
    os.set_inheritable(theirs.fileno(), True)
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(search_path()), str(theirs.fileno()), RUNNER],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env=_environment(device),
        start_new_session=True,  # Ctrl-C reaches only the front end, which then ends the judge
    )
    theirs.close()
    return connection, process


def judge_for(options: Options, device: str = "auto") -> Judge:
    """The judge for a run: another process, or with ``in_process`` this process."""
    if not options.in_process:
        return JudgeProcess(options, device)
    # In its own process the judge is given this path; here it has to be set.
    sys.path[:] = search_path()
    judge: Judge = importlib.import_module(RUNNER).Runner(options)
    return judge


def search_path() -> list[str]:
    """The path on which a backend is looked for: that of this process, and the directory that it was started in."""
    # As `python -m` does: a console script does not put the current directory, which may have the backend, on the path.
    here = os.getcwd()
    return [*sys.path] if here in sys.path or "" in sys.path else [here, *sys.path]


def _environment(device: str) -> dict[str, str]:
    environment = dict(os.environ)
    if device == "cpu" or (device == "auto" and not visible_gpus(environment)):
        # The process that workers are forked from imports Triton early, and kernels are to run in its interpreter.
        environment.setdefault("TRITON_INTERPRET", "1")
    # The tensors are tiny, and waiting OpenMP threads spin: two workers on two busy cores then take 20 times as long.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _serve() -> None:
    """The judge's side, in a fresh interpreter."""
    # A worker or a package may print; the front end's stdout is for results.
    os.dup2(2, 1)
    connection = Connection(int(sys.argv[2]))
    os.set_inheritable(connection.fileno(), False)
    _serve_runner(connection, sys.argv[3])


def serve(_: Connection, listening: socket.socket) -> None:
    """The judge's side, in a process that was forked for a worker of xdist."""
    if connection := judge_of_worker.accepted(listening):
        _serve_runner(connection, _LOOP)


def _serve_runner(connection: Connection, runner_module: str) -> NoReturn:
    """Answer what comes until the pipe is closed."""
    try:
        if runner_module == _LOOP:
            fork_off()
        options: Options = connection.recv()
        runner = importlib.import_module(runner_module).Runner(options)
        runner.note = partial(_tell, connection, "note")
        runner.begun = partial(_tell, connection, "begun")
    except BaseException as error:
        connection.send(("error", f"the judge could not start: {type(error).__name__}: {error}"))
        raise
    # Modules stay until ``os._exit``: no collection need look at them.
    gc.freeze()
    gc.enable()
    ending: list[bool] = []

    def stop(*_: object) -> None:
        # A signal in the middle of it goes back to it: the front end closes the pipe and sends one as well. No lock may
        # be taken here that this thread could hold when the signal comes, such as an Event's.
        if not ending:
            ending.append(True)
            runner.close()
            judge_of_worker.end()
            os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            # Reset where the front end went away without having read everything.
            stop()
        with contextlib.suppress(ConnectionError):
            _answer(runner, message, connection)


def _tell(connection: Connection, kind: str, value: object) -> None:
    with contextlib.suppress(ConnectionError):  # the results that follow find out
        connection.send((kind, value))


def _answer(runner: Any, message: tuple[Any, ...], connection: Connection) -> None:
    kind, *values = message
    try:
        if kind == "run":
            with contextlib.closing(runner.run(*values)) as results:
                for result in results:
                    connection.send(("result", result))
            connection.send(("result", None))
        elif kind == "plan":
            connection.send(("plan", runner.plan(*values)))
        elif kind == "device":
            connection.send(("device", runner.device_name(*values)))
        elif kind == "capabilities":
            connection.send(("capabilities", runner.declared(*values)))
        elif kind == "fork":
            connection.send(("fork", judge_of_worker.start()))
        else:
            connection.send(("declared", runner.capabilities_lines(*values)))
    except UsageError as error:
        connection.send(("usage", str(error)))
    except ConnectionError:
        raise
    except Exception as error:
        connection.send(("error", "".join(traceback.format_exception(error)).rstrip()))
