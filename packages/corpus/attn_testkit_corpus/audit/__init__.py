"""A test of the kit by seeded bugs: every broken backend must be caught, every healthy control must pass."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from attn_testkit.environment import resolve
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.planning.request import Options
from attn_testkit.running.processes.forking import begin_forking, preload
from attn_testkit.running.processes.merging import merged

from ..faults import all_faults
from ..faults.catalogue import field_bugs_in
from .adversarial import FrontEnd, run_adversarial
from .tasks import run_task, tasks_for
from .verdicts import AdversarialVerdict, Audit, FaultVerdict, Settings, Task, Verdict

__all__ = ["Audit", "Settings", "audit"]


def audit(settings: Settings, see: Callable[[Verdict, int, int], None] | None = None) -> Audit:
    """Run everything that ``settings`` ask for. ``see`` gets each verdict, the number done, and the number of all.

    Raises ``UsageError`` if the settings name nothing, or a device that this machine lacks.
    """
    started = time.perf_counter()
    environment = resolve(settings.device)
    environment.prepare_process()
    # Before the fork: workers have the search path of this process, with the folder of field bugs.
    bugs = field_bugs_in(settings.field_bugs) if settings.field_bugs else ()
    preload("attn_testkit_corpus.faults.everything")
    # It imports all faults while this process does.
    begin_forking()
    tasks = tasks_for(settings)
    result = Audit(settings, device=environment.name)
    for count, verdict in enumerate(_verdicts(tasks, settings), start=1):
        if isinstance(verdict, FaultVerdict):
            result.faults.append(verdict)
        elif isinstance(verdict, AdversarialVerdict):
            result.adversarial.append(verdict)
        else:
            result.controls.append(verdict)
        if see:
            see(verdict, count, len(tasks))
    order = {fault.slug: index for index, fault in enumerate(bugs or all_faults())}
    result.faults.sort(key=lambda verdict: order[verdict.slug])
    result.adversarial.sort(key=lambda verdict: verdict.slug)
    result.controls.sort(key=lambda verdict: (verdict.name, verdict.mode, verdict.execution))
    result.seconds = time.perf_counter() - started
    return result


def _verdicts(tasks: Sequence[Task], settings: Settings) -> Iterator[Verdict]:
    """Verdicts in the order in which they come. A worker is forked for each task and ends with it; the judge is
    reused."""
    waiting = deque(tasks)
    jobs = max(1, min(settings.jobs, len(tasks)))
    options = Options(timeout_s=settings.timeout_s, asks_afresh=False, diagnose="all")
    runners = [Runner(options, apart=jobs > 1) for _ in range(jobs)]
    front_ends = [FrontEnd(settings) for _ in runners]

    def verdicts_of(runner: Runner, front_end: FrontEnd) -> Iterator[Verdict]:
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            if task.kind == "adversarial":
                yield run_adversarial(task, front_end)
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
