"""Running a step again with one thing changed."""

from __future__ import annotations

from ..cases.schedule import Schedule, Step
from ..checks.observation import Observation
from ..contract import AttentionBackend
from ..environment import Environment
from ..runner_modes.clock import Clock
from ..runner_modes.eager import run_eager
from ..runner_modes.graphs import GraphRun, drive_graphs
from ..runner_modes.harness import ServerHarness
from ..runner_modes.options import DriveOptions

__all__ = ["OTHER_FILL", "POISON", "Rerunner"]

POISON, OTHER_FILL = 0xFF, 0xBC
"""Bytes of uninitialised memory: NaN, and a small number whose bits change when it is rounded to another dtype."""


class Rerunner:
    """Re-runs of one backend, each on a fresh instance. A run that raises counts as wrong."""

    def __init__(self, backend_class: type[AttentionBackend], environment: Environment) -> None:
        self.backend_class, self.environment = backend_class, environment

    def eager(
        self,
        schedule: Schedule,
        step: Step,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        fill: int = POISON,
    ) -> Observation | None:
        """One eager step; None if it raised."""
        try:
            with self.environment.active(fill, controlled=True):
                return run_eager(self._harness(schedule, unowned, fill), schedule, step, Clock(), pattern=pattern)
        except Exception:
            return None

    def graph(
        self,
        schedule: Schedule,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        poison_allocated: bool = True,
        copy_into_replaced: bool = False,
        fill: int = POISON,
    ) -> GraphRun | None:
        """A whole graph drive, replays only; None if it raised."""
        options = DriveOptions(
            pattern=pattern,
            poison_allocated=poison_allocated,
            watch_replaced=True,
            copy_into_replaced=copy_into_replaced,
            eager_steps=False,
        )
        try:
            with self.environment.active(fill, controlled=True):
                return drive_graphs(self._harness(schedule, unowned, fill), [schedule], Clock(), options)
        except Exception:
            return None

    def _harness(self, schedule: Schedule, unowned: float | None, fill: int) -> ServerHarness:
        extra = {} if unowned is None else {"unowned": unowned}
        return ServerHarness(self.backend_class, [schedule], self.environment.device, fill=fill, **extra)
