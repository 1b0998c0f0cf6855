"""Running a step again with one thing changed."""

from __future__ import annotations

from ..cases.schedule import Schedule, Step
from ..checks.observation import Observation
from ..contract import AttentionBackend
from ..environment import Environment
from ..runner_modes.drive import Clock, GraphDrive, drive_graphs, run_eager
from ..runner_modes.world import World

__all__ = ["OTHER_FILL", "POISON", "Bench"]

POISON, OTHER_FILL = 0xFF, 0xBC
"""Bytes of uninitialised memory: NaN, and a small number whose bits change when it is rounded to another dtype."""


class Bench:
    """Re-runs of one backend on fresh instances. A run that raises counts as wrong."""

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
        """One eager step."""
        try:
            with self.environment.active(fill, controlled=True):
                world = self._world(schedule, unowned, fill)
                return run_eager(world, schedule, step, Clock(), pattern=pattern)
        except Exception:
            return None

    def graph(
        self,
        schedule: Schedule,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        poison_born: bool = True,
        heal: bool = False,
        fill: int = POISON,
    ) -> tuple[list[Observation], GraphDrive] | None:
        """A whole graph drive; replays only."""
        try:
            with self.environment.active(fill, controlled=True):
                world = self._world(schedule, unowned, fill)
                seen, drives = drive_graphs(
                    world,
                    [schedule],
                    Clock(),
                    eager=False,
                    pattern=pattern,
                    poison_born=poison_born,
                    watch=True,
                    heal=heal,
                )
                return [observed for _, observed in seen], drives[0]
        except Exception:
            return None

    def _world(self, schedule: Schedule, unowned: float | None, fill: int) -> World:
        extra = {} if unowned is None else {"unowned": unowned}
        return World(self.backend_class, [schedule], self.environment.device, fill=fill, **extra)
