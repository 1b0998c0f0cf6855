"""Tasks spread over child processes. A fault that kills or hangs its process costs one, and counts as caught so."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..faults import all_controls, all_faults
from ..graphs.capture import settle
from ..running.pool import ending
from .tasks import run_task
from .verdicts import ControlVerdict, FaultVerdict, Settings, Task, Verdict

__all__ = ["run_in_processes"]


@dataclass
class Child:
    """One child process with at most one task."""

    connection: Connection
    process: BaseProcess
    task: Task | None = None
    deadline: float = float("inf")

    @staticmethod
    def start(settings: Settings) -> Child:
        """A new process, which begins to import at once."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        process.start()
        theirs.close()
        return Child(ours, process)

    def give(self, task: Task, settings: Settings) -> None:
        """Start a task."""
        self.task = task
        # A first task waits for the imports; a control runs all cases of a mode.
        self.deadline = time.monotonic() + settings.timeout_s * (5 if task.kind == "control" else 1) + 60
        self.connection.send(task)

    def collect(self) -> tuple[Verdict | None, bool]:
        """The verdict, if there is one, and whether the process is of no more use."""
        assert self.task is not None
        try:
            verdict: Verdict | None = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            self.process.join(timeout=5)
            return _lost(self.task, "crashed", ending(self.process.exitcode or 0)), True
        if verdict is not None:
            self.task, self.deadline = None, float("inf")
            # After a lost device context every later task of this process would fail for that alone.
            return verdict, verdict.lost
        if time.monotonic() > self.deadline:
            return _lost(self.task, "timed out", "gave no result in time"), True
        return None, False

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _lost(task: Task, how: str, message: str) -> Verdict:
    text = f"{task.name}: its process {message}"
    if task.kind == "control":
        return ControlVerdict(task.name, task.mode, task.execution, 1, 1, (text,), lost=True)
    fault = next(fault for fault in all_faults() if fault.slug == task.name)
    return FaultVerdict(
        fault.slug, fault.bug_class, fault.source, fault.checks, (how,), text=text, case_runs=1, lost=True
    )


def run_in_processes(tasks: Sequence[Task], settings: Settings) -> Iterator[Verdict]:
    """Verdicts as they come."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads cost far more than they give on busy cores
    waiting = deque(tasks)
    count = max(1, min(settings.jobs, len(waiting)))
    children = [Child.start(settings) for _ in range(count)]
    try:
        while waiting or any(child.task for child in children):
            for child in children:
                if child.task is None and waiting:
                    child.give(waiting.popleft(), settings)
            busy: list[Connection | int] = [child.connection for child in children if child.task]
            wait(busy, timeout=1.0)
            for index, child in enumerate(children):
                if child.task is None:
                    continue
                verdict, spent = child.collect()
                if spent:
                    child.close()
                    children[index] = Child.start(settings)  # also when nothing waits: the list keeps its length
                if verdict is not None:
                    yield verdict
    finally:
        for child in children:
            child.close()


def _serve(connection: Any, settings: Settings) -> None:
    """The child's side."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    all_faults(), all_controls()
    settle()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(run_task(task, settings))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
