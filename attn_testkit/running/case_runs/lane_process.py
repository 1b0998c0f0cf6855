"""A lane in its own process: both ends of the pipe between it and the ``Runner``. It is forked from the process from
which workers are forked. At its start it forks the process from which its own workers are forked, so no worker descends
from a process that has held an expected value. A lane imports no candidate.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ...cases.case import Case
from ...catalogue.tiers import generate
from ...contract import Capabilities, ForwardMode
from ...registry import BackendNotFound
from ...results.case_result import CaseResult, Status
from ...runner_modes.messages import Described
from ..planning.candidate import Candidate
from ..planning.request import Item, Options, Plan, kit_error
from ..processes.child import START_SECONDS, Child, ChildLost
from ..processes.forking import fork_off
from ..processes.gpus import ANY_GPU, Gpu
from ..processes.worker_process import WorkerStartError, import_seconds
from .lane import Lane, Lost, Work

MODULE = "attn_testkit.running.case_runs.lane_process"
_GRACE = 5.0
"""Seconds for a lane to end its workers before it is killed."""
_EVALUATING = 3600.0
"""Time limit in seconds for evaluating one answer of a worker, far above the longest evaluation."""
_HEAD_START = 0.5
"""Seconds that the first worker of a run has the device to itself: one makes its context in 0.2 s, and one among 14 in
1.7 s (H100), for which the plan would wait. An import that takes longer is begun by the others then."""
_ALIVE = None
"""Sign of life that is sent between two long operations: a lane that sends nothing hangs."""


@dataclass(frozen=True)
class _Note:
    """Message on what a diagnosis does; a sign of life, too."""

    text: str


class LaneProcess:
    """``Lane`` in another process: evaluates one case-run at a time. Used by one thread; another may close it.

    Its process starts with the first question.
    """

    def __init__(self, options: Options, gpu: Gpu = ANY_GPU) -> None:
        self._options, self._gpu = options, gpu
        # One run by a new worker.
        self._patience = _EVALUATING + START_SECONDS + import_seconds(options.timeout_s) + options.timeout_s
        self.child: Child | None = None
        """Process of the lane."""
        self._started = self._closed = False
        self._plan: Plan | None = None
        self._item: Item | None = None
        self._failed = ""
        self.note: Callable[[str], None] = lambda text: None
        """Called with what a diagnosis does there."""

    def start(self, candidate: Candidate, device: str) -> None:
        """Let its worker import a backend, and do not wait for it. Raises ``WorkerStartError``."""
        self._tell("start", candidate, device)

    def describe(self, candidate: Candidate, device: str, meanwhile: Callable[[], None] = lambda: None) -> Described:
        """Return what a backend declares. Raises ``UsageError`` if it cannot be imported, and ``WorkerStartError``.

        ``meanwhile``: called when it is described, or after a head start if that takes longer.
        """
        self._tell("describe", candidate, device)
        called, until = False, time.monotonic() + _HEAD_START
        try:
            while True:
                assert self.child is not None
                if not called and _is_silent(self.child.connection, until):
                    called = True
                    meanwhile()
                if (answer := self._answer()) is not _ALIVE:
                    break
        except ChildLost as error:
            raise WorkerStartError(f"a lane could not start: {error.reason}") from error
        kind, value = answer
        if kind != "described":
            raise (BackendNotFound if kind == "not found" else WorkerStartError)(value)
        if not called:
            meanwhile()
        described: Described = value
        return described

    def draw(self, declared: Capabilities, modes: Sequence[ForwardMode], tier: str, seed: int) -> bool:
        """Let the lane generate the cases of some modes, for ``drawn``; returns whether it does."""
        try:
            self._tell("draw", declared, tuple(modes), tier, seed)
        except WorkerStartError:
            return False
        return True

    def drawn(self) -> tuple[tuple[Case, ...], ...]:
        """Return the cases of each mode; nothing if its process was lost."""
        try:
            while (answer := self._answer()) is _ALIVE:
                pass
        except ChildLost:
            return ()
        cases: tuple[tuple[Case, ...], ...] = answer
        return cases

    def begin(self, plan: Plan, work: Work) -> None:
        """Give the lane a case-run; ``result`` returns its result."""
        self._item, self._failed = work.item, ""
        known = plan is self._plan and self.child is not None and not self.child.ended
        try:
            self._tell("run", None if known else plan, work)
        except WorkerStartError as error:
            self._failed = str(error)
        else:
            self._plan = plan

    def result(self) -> tuple[CaseResult | Lost, bool | None] | None:
        """Return what ``Lane.run`` returned there, or ``Lost`` if the process died. None: the lane is alive and has not
        finished. A process that hangs loses this case-run. Called for lanes that ``ready`` returns.
        """
        assert self._item is not None
        if self._failed:
            return Lost(self._failed), None
        try:
            answer: tuple[CaseResult | Lost, bool | None] | None = self._answer()
        except ChildLost as error:
            how = f"the lane, which evaluates results of its worker: {error.reason}"
            # One that hangs has taken an hour.
            return Lost(how) if error.status is Status.CRASHED else kit_error(self._item, how), None
        return answer

    @property
    def is_through(self) -> bool:
        """Report whether the case-run that was begun has finished."""
        return bool(self._failed) or self.child is None or self.child.ended

    def end(self) -> None:
        """Ask its process to end with its workers, and do not wait for it: ``close`` does."""
        if self.child is not None:
            self.child.end()

    def close(self) -> None:
        """End its process and its workers."""
        self._closed = True
        if self.child is not None:
            self.child.close()

    def _tell(self, *message: object) -> None:
        """Let the process do something. Raises ``WorkerStartError`` if there is no process and none can be started."""
        try:
            if self.child is None or self.child.ended:
                self._started = False
                self.child = Child(MODULE, self._options, self._gpu, reader=pickle.loads, grace=_GRACE)
                if self._closed:  # while it was started
                    self.child.close()
            self.child.tell(message, self._patience)
        except (OSError, EOFError) as error:
            raise WorkerStartError(f"no process could be started: {error}") from error
        except ChildLost as error:
            raise WorkerStartError(f"a lane ended while it was idle: {error.reason}") from error

    def _answer(self) -> Any:
        """Return its next message. Raises ``ChildLost``."""
        assert self.child is not None
        if self._started:
            answer = self.child.answer()
        else:
            self.child.wait_until_started()
            self._started, answer = True, _ALIVE
        if isinstance(answer, _Note):
            self.note(answer.text)
            answer = _ALIVE
        if answer is _ALIVE:
            self.child.wait_for(self._patience)
        return answer


def _is_silent(connection: Connection, until: float) -> bool:
    """Wait for a message until a time, and report whether none came."""
    try:
        return not connection.poll(max(0.0, until - time.monotonic()))
    except OSError:  # another thread has closed it
        return False


def ready(lanes: Sequence[LaneProcess]) -> list[LaneProcess]:
    """Wait until a busy lane has sent something or cannot send any more, and return all such lanes."""
    if through := [lane for lane in lanes if lane.is_through]:
        return through
    said = {lane.child.connection: lane for lane in lanes if lane.child}
    patience = min(lane.child.seconds_left for lane in lanes if lane.child)
    try:
        found = wait(list(said), patience)
    except (OSError, ValueError):  # another thread has closed one
        return [lane for lane in lanes if lane.is_through]
    overdue = [lane for lane in lanes if lane.child and not lane.child.seconds_left]
    return [lane for connection, lane in said.items() if connection in found] or overdue


def serve(connection: Connection, options: Options, gpu: Gpu) -> None:
    """Evaluate what comes until the pipe is closed."""
    # Workers are forked from this process, made while it holds nothing. A lane may start processes, a worker may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    fork_off()
    torch.set_num_threads(1)
    ending: list[bool] = []

    def stop(*_: object) -> None:
        # A signal in the middle of it goes back to it.
        if not ending:
            ending.append(True)
            lane.close()
            os._exit(0)

    def say(message: object) -> None:
        try:
            connection.send(message)
        except ConnectionError:
            stop()

    lane = Lane(options, gpu, alive=lambda: say(_ALIVE))
    lane.note = lambda text: say(_Note(text))
    signal.signal(signal.SIGTERM, stop)
    plan: Plan | None = None
    while True:
        try:
            kind, *values = connection.recv()
        except (EOFError, ConnectionError):
            stop()
        if kind == "run":
            given, work = values
            plan = given or plan
            assert plan is not None
            say(lane.run(plan, work))
        elif kind == "draw":
            declared, modes, tier, seed = values
            say(tuple(generate(declared, mode, tier, seed) for mode in modes))
        elif kind == "describe":
            say(_described(lane, *values))
        else:
            _start(lane, *values)


def _described(lane: Lane, candidate: Candidate, device: str) -> tuple[str, Any]:
    try:
        return "described", lane.describe(candidate, device)
    except BackendNotFound as error:
        return "not found", str(error)
    except WorkerStartError as error:
        return "not started", str(error)


def _start(lane: Lane, candidate: Candidate, device: str) -> None:
    try:
        lane.start(candidate, device)
    except WorkerStartError:
        return  # the run will ask for one again, and say what is in the way
