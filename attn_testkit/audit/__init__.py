"""The kit judged by its faults: every broken backend must be caught, every healthy control must pass."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..environment import resolve
from ..faults import all_faults
from .processes import run_in_processes
from .tasks import run_task, tasks_for
from .verdicts import Audit, FaultVerdict, Settings, Verdict

__all__ = ["Audit", "Settings", "audit"]


def audit(settings: Settings, see: Callable[[Verdict, int, int], None] | None = None) -> Audit:
    """Run everything that ``settings`` ask for. ``see`` gets each verdict, how many are done, and how many there are.

    Raises ``UsageError`` when the settings name nothing, or a device that is not here.
    """
    tasks = tasks_for(settings)
    started = time.perf_counter()
    result = Audit(settings, device=resolve(settings.device).name)
    here = settings.jobs == 1 and len(tasks) == 1
    verdicts = [run_task(tasks[0], settings)] if here else run_in_processes(tasks, settings)
    for count, verdict in enumerate(verdicts, start=1):
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
