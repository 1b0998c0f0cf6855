"""The kit judged by its faults: every broken backend must be caught, every healthy control must pass."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ..environment import resolve
from ..faults import all_faults
from ..running.loop import Runner
from ..running.pool import preload
from ..running.request import Options
from .tasks import run_task, tasks_for
from .verdicts import Audit, FaultVerdict, Settings, Task, Verdict

__all__ = ["Audit", "Settings", "audit"]


def audit(settings: Settings, see: Callable[[Verdict, int, int], None] | None = None) -> Audit:
    """Run everything that ``settings`` ask for. ``see`` gets each verdict, how many are done, and how many there are.

    Raises ``UsageError`` when the settings name nothing, or a device that is not here.
    """
    tasks = tasks_for(settings)
    started = time.perf_counter()
    result = Audit(settings, device=resolve(settings.device).name)
    resolve(settings.device).prepare_process()
    preload("attn_testkit.faults.everything")
    for count, verdict in enumerate(_verdicts(tasks, settings), start=1):
        if isinstance(verdict, FaultVerdict):
            result.faults.append(verdict)
        else:
            result.controls.append(verdict)
        if see:
            see(verdict, count, len(tasks))
    order = {fault.slug: index for index, fault in enumerate(all_faults())}
    result.faults.sort(key=lambda verdict: order[verdict.slug])
    result.controls.sort(key=lambda verdict: (verdict.name, verdict.mode, verdict.execution))
    result.seconds = time.perf_counter() - started
    return result


def _verdicts(tasks: Sequence[Task], settings: Settings) -> Iterator[Verdict]:
    """As they come. Each thread judges what its worker did; a worker is forked for each task and ends with it."""
    waiting = deque(tasks)
    found: queue.SimpleQueue[Verdict | BaseException | None] = queue.SimpleQueue()
    runners = [Runner(Options(timeout_s=settings.timeout_s)) for _ in range(max(1, min(settings.jobs, len(tasks))))]

    def work(runner: Runner) -> None:
        try:
            while waiting:
                try:
                    task = waiting.popleft()
                except IndexError:
                    break
                found.put(run_task(task, settings, runner))
        except BaseException as error:
            found.put(error)
        found.put(None)

    threads = [threading.Thread(target=work, args=(runner,), daemon=True) for runner in runners]
    for thread in threads:
        thread.start()
    left = len(threads)
    try:
        while left:
            verdict = found.get()
            if isinstance(verdict, BaseException):
                raise verdict
            if verdict is None:
                left -= 1
            else:
                yield verdict
    finally:
        waiting.clear()
        for runner in runners:
            runner.close()
