"""The kit judged by its faults: every broken backend must be caught, every healthy control must pass."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from ..environment import resolve
from ..faults import all_faults
from ..running.forking import preload
from ..running.judge_process import WORKERS_OF_ONE
from ..running.loop import Runner
from ..running.merging import merged
from ..running.pool import ending
from ..running.request import Options
from .hostile import FrontEnd, run_hostile
from .tasks import run_task, tasks_for
from .verdicts import Audit, FaultVerdict, HostileVerdict, Settings, Task, Verdict

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
        elif isinstance(verdict, HostileVerdict):
            result.hostile.append(verdict)
        else:
            result.controls.append(verdict)
        if see:
            see(verdict, count, len(tasks))
    order = {fault.slug: index for index, fault in enumerate(all_faults())}
    result.faults.sort(key=lambda verdict: order[verdict.slug])
    result.hostile.sort(key=lambda verdict: verdict.slug)
    result.controls.sort(key=lambda verdict: (verdict.name, verdict.mode, verdict.execution))
    result.seconds = time.perf_counter() - started
    return result


def _verdicts(tasks: Sequence[Task], settings: Settings) -> Iterator[Verdict]:
    """As they come, from as many judging processes as a run with so many jobs has."""
    jobs = max(1, min(settings.jobs, len(tasks)))
    count = -(-jobs // WORKERS_OF_ONE)
    if count == 1:
        yield from judged_here(tasks, settings, jobs)
        return
    context = multiprocessing.get_context("spawn")
    pipes = []
    for index in range(count):
        ours, theirs = context.Pipe()
        threads = jobs // count + (index < jobs % count)
        process = context.Process(target=_judge, args=(theirs, tasks[index::count], settings, threads))
        process.start()
        theirs.close()
        pipes.append((ours, process))
    try:
        waiting = dict(pipes)
        while waiting:
            for ready in wait(list(waiting)):
                assert isinstance(ready, Connection)
                try:
                    yield ready.recv()
                except EOFError:
                    process = waiting.pop(ready)
                    process.join()
                    if process.exitcode:
                        raise RuntimeError(f"a process of the audit {ending(process.exitcode)}") from None
    finally:
        for ours, process in pipes:
            ours.close()
            process.terminate()
            process.join()


def _judge(connection: Connection, tasks: Sequence[Task], settings: Settings, threads: int) -> None:
    """What one process of several does. Ctrl-C is for the first, which then ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resolve(settings.device).prepare_process()
    preload("attn_testkit.faults.everything")
    for verdict in judged_here(tasks, settings, threads):
        connection.send(verdict)


def judged_here(tasks: Sequence[Task], settings: Settings, jobs: int) -> Iterator[Verdict]:
    """As they come. Each thread judges what its worker did; a worker is forked for each task and ends with it."""
    waiting = deque(tasks)
    runners = [Runner(Options(timeout_s=settings.timeout_s, asks_afresh=False)) for _ in range(jobs)]
    front_ends = [FrontEnd(settings) for _ in runners]

    def verdicts_of(runner: Runner, front_end: FrontEnd) -> Iterator[Verdict]:
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            if task.kind == "hostile":
                yield run_hostile(task, front_end)
            else:
                yield run_task(task, settings, runner)

    def end() -> None:
        waiting.clear()
        for runner, front_end in zip(runners, front_ends, strict=True):
            runner.close()
            front_end.close()

    try:
        yield from merged([verdicts_of(*each) for each in zip(runners, front_ends, strict=True)], end)
    finally:
        end()
