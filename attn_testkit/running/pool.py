"""Case-runs in child processes: a backend that kills or hangs its process costs one case-run, not the run."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from ..results import CaseResult, Finding, Status

if TYPE_CHECKING:
    from .plan import RunPlan, WorkItem

__all__ = ["KIT_ERROR", "Worker", "WorkerStartError", "bare_result", "ending", "kit_error", "run_isolated"]

ENGINE = "attn_testkit.running.plan"
KIT_ERROR = "the kit itself failed: "
"""How the reason of a result begins when the fault is ours, not the backend's."""
START_SECONDS = 300.0
"""For a worker to import torch and the backend on a busy machine."""
LAST_LINES = 12
_RUNS = itertools.count()
FRAMES = 5

# The child has the parent's sys.path before it imports anything: a backend may stand anywhere the parent looks.
_BOOT = "import json,sys; sys.path[:]=json.loads(sys.argv[1]); from attn_testkit.running.pool import _serve; _serve()"


class WorkerStartError(Exception):
    """A worker died before it could take a case-run; the message ends with its last words."""


def run_isolated(
    plan: RunPlan,
    *,
    timeout_s: float,
    jobs: int = 1,
    gpus: Sequence[str] = (),
    engine: str = ENGINE,
    spare: Worker | None = None,
) -> Iterator[CaseResult]:
    """Run the plan's items in ``jobs`` child processes and yield results as they come.

    A process that dies yields ``CRASHED``, one that takes longer than ``timeout_s`` for a case-run ``TIMED_OUT``; both
    are replaced. ``gpus`` are ``CUDA_VISIBLE_DEVICES`` values that the workers take turns with; ``spare`` is a worker
    already starting. Closing the generator ends every worker.
    """
    waiting = deque(_groups(plan))
    payload = pickle.dumps(plan)
    slots = max(1, min(jobs, len(waiting)))
    free_gpus = deque(gpus[index % len(gpus)] for index in range(slots)) if gpus else deque([""] * slots)
    workers: list[Worker] = []
    if spare is not None:
        workers.append(spare)
        free_gpus.popleft()
    try:
        while waiting or any(worker.busy for worker in workers):
            while len(workers) < slots and len(workers) < len(waiting) + sum(w.busy for w in workers):
                workers.append(Worker(engine, timeout_s, gpu=free_gpus.popleft()))
            for worker in workers:
                worker.take(payload, waiting)
            for worker in _stirred(workers):
                result = worker.collect(plan)
                if result is not None:
                    yield result
                if worker.ended:
                    workers.remove(worker)
                    if worker.group:
                        waiting.appendleft(worker.group)
                    free_gpus.append(worker.gpu)
                    worker.close()
    finally:
        for worker in workers:
            worker.close()
        if spare is not None:
            spare.close()


def _groups(plan: RunPlan) -> list[deque[int]]:
    """Neighbours that share a case, eager and graph, go to the same worker: they share data and the oracle's answer."""
    groups: list[deque[int]] = []
    last = None
    for index, item in enumerate(plan.items):
        key = (item.backend, item.case.id)
        if key != last:
            groups.append(deque())
        groups[-1].append(index)
        last = key
    return groups


def _stirred(workers: Sequence[Worker]) -> list[Worker]:
    nearest = min((worker.deadline for worker in workers), default=0.0) - time.monotonic()
    wait([worker.connection for worker in workers], timeout=max(0.0, min(nearest, 0.5)))
    return list(workers)


def run_guarded(engine: Any, item: WorkItem, plan: RunPlan) -> CaseResult:
    """``engine.run_item``, with a result also when it raises."""
    count = next(_RUNS)
    if count in (1, 8) or count % 200 == 199:
        # As engine.run does: what survived the first case-runs is kept out of every later garbage collection.
        getattr(engine, "settle", int)()
    try:
        result: CaseResult = engine.run_item(item, plan)
        return result
    except SystemExit as error:
        finding = Finding("completes", f"the backend raised SystemExit({error.code!r})")
        return replace(bare_result(item, Status.FAILED, "", plan.header.device), findings=(finding,))
    except Exception as error:
        return kit_error(item, error)


def kit_error(item: WorkItem, error: BaseException) -> CaseResult:
    """The result of a case-run that our own code failed: nobody may take it for a verdict on the backend."""
    from ..checks.failures import device_full

    if full := device_full(error):
        return bare_result(item, Status.CRASHED, full)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return bare_result(item, Status.CRASHED, f"{KIT_ERROR}{type(error).__name__}: {error}\n{trace}")


def bare_result(item: WorkItem, status: Status, reason: str, device: str = "") -> CaseResult:
    """The result of a case-run that could not tell its own: where and why, and nothing measured."""
    mode, execution = str(item.mode.value), str(item.execution.value)
    graph = device if execution == "graph" else ""
    return CaseResult(item.backend, mode, execution, item.case.id, status, reason=reason, device=device, graph=graph)


class Worker:
    """One child process, seen from the parent. Starts importing at once; takes one case-run at a time."""

    def __init__(self, engine: str = ENGINE, timeout_s: float = 300.0, *, gpu: str = "") -> None:
        self.gpu = gpu
        self.item: int | None = None
        self.group: deque[int] = deque()
        """What it will run next."""
        self.ended = False
        self._timeout_s = timeout_s
        self._ready = False
        self._planned = False
        self.deadline = time.monotonic() + max(START_SECONDS, timeout_s)
        self._mark = 0
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self.connection, theirs = Pipe()
        os.set_inheritable(theirs.fileno(), True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno()), engine, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=self._words,
            stderr=self._words,
            pass_fds=[theirs.fileno()],
            env=_environment(gpu),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the workers
        )
        theirs.close()

    @property
    def busy(self) -> bool:
        """Whether it has work."""
        return self.item is not None or bool(self.group)

    def take(self, payload: bytes, waiting: deque[deque[int]]) -> None:
        """Hand over the plan, then the next item if the worker is free."""
        try:
            if not self._planned:
                self._planned = True
                self.connection.send_bytes(payload)
            if self._ready and self.item is None and (self.group or waiting):
                self._mark = self._words.seek(0, os.SEEK_END)
                self.group = self.group or waiting.popleft()
                self.connection.send(self.group[0])
                self.item = self.group.popleft()
                self.deadline = time.monotonic() + self._timeout_s
        except ConnectionError:
            # It died between two case-runs, and the next one is not to blame: collect() will notice and give it back.
            pass

    def collect(self, plan: RunPlan) -> CaseResult | None:
        """What has happened since the last look: a result, a death, a missed deadline, or nothing."""
        try:
            message = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return self._died(plan)
        if message is not None:
            return self._hear(message, plan)
        if self._process.poll() is not None and not self.connection.poll():
            return self._died(plan)
        return self._hung(plan) if time.monotonic() > self.deadline else None

    def close(self) -> None:
        """End the process and everything it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self.connection.close()
        self._words.close()
        self.ended = True

    def _hear(self, message: tuple[str, Any], plan: RunPlan) -> CaseResult | None:
        kind, value = message
        if kind == "ready":
            self._ready, self.deadline = True, float("inf")
            return None
        if kind == "no plan":
            raise WorkerStartError(f"a worker could not read the plan: {value}")
        assert self.item is not None
        self.item, self.deadline = None, float("inf")
        result: CaseResult = value
        # A lost device context outlives the case-run; the next one needs a fresh process.
        self.ended = result.status is Status.CRASHED
        # A device-side assertion says what failed on stderr, and only there.
        return replace(result, reason=result.reason + self._last_words()) if self.ended else result

    def _died(self, plan: RunPlan) -> CaseResult | None:
        self.ended = True
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        if self.item is None:
            if not self._ready:
                raise WorkerStartError(f"a worker {ending(code)} while starting{self._last_words()}")
            return None
        return self._lost(plan, Status.CRASHED, f"the process {ending(code)}{self._last_words()}")

    def _hung(self, plan: RunPlan) -> CaseResult | None:
        if self.item is None:
            raise WorkerStartError(f"a worker was not ready after {START_SECONDS:.0f} s{self._last_words()}")
        self.ended = True
        text = f"no result after {self._timeout_s:g} s{self._last_words()}"
        return self._lost(plan, Status.TIMED_OUT, text)

    def _lost(self, plan: RunPlan, status: Status, reason: str) -> CaseResult:
        assert self.item is not None
        item, self.item = plan.items[self.item], None
        return bare_result(item, status, reason, plan.header.device)

    def _last_words(self) -> str:
        self._words.seek(self._mark)
        lines = [line.rstrip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n  {line}" for line in _said(lines))


def _said(lines: list[str]) -> list[str]:
    """The last lines, with of Python's own stack dump only the innermost frames of the thread that matters."""
    stacks = [i for i, line in enumerate(lines) if "most recent call first" in line]
    if not stacks:
        return lines[-LAST_LINES:]
    # A fatal error marks the thread it happened in; a dump on a timer does not, and has the main thread last.
    stack = next((i for i in stacks if lines[i].startswith("Current thread")), stacks[-1])
    before = [line for line in lines[: stacks[0]] if not line.startswith("Timeout (")]
    frames = [line for line in lines[stack + 1 : stack + 1 + FRAMES] if line.startswith("  File")]
    frames = [line for line in frames if __file__ not in line and '"<string>"' not in line]
    return before[-(LAST_LINES - len(frames)) :] + frames


def ending(code: int) -> str:
    """How a process came to its end, in words, from its exit code as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended itself with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def _environment(gpu: str) -> dict[str, str]:
    environment = dict(os.environ)
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    # The tensors are tiny, and waiting OpenMP threads spin: two workers on two busy cores then take 20 times as long.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _serve() -> None:
    """The child's side."""
    connection = Connection(int(sys.argv[2]))
    os.set_inheritable(connection.fileno(), False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.enable(all_threads=False)
    timeout_s = float(sys.argv[4])
    engine = importlib.import_module(sys.argv[3])
    try:
        plan = pickle.loads(connection.recv_bytes())
    except EOFError:
        os._exit(0)
    except Exception as error:
        connection.send(("no plan", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", None))
    while True:
        try:
            index = connection.recv()
        except EOFError:
            os._exit(0)
        # Shortly before the parent gives up, say where it hangs.
        faulthandler.dump_traceback_later(max(timeout_s - 0.5, timeout_s * 0.7), exit=False)
        result = run_guarded(engine, plan.items[index], plan)
        faulthandler.cancel_dump_traceback_later()
        connection.send(("result", result))


def _die_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.killpg(0, signal.SIGKILL)
