"""What diagnosis asks for: a step run again, on a fresh instance, with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..cases.schedule import Schedule, Step
from ..checks.observation import Observation

__all__ = ["GraphFacts", "Reruns", "of_step"]

POISON = 0xFF
"""The byte of fresh memory: NaN in every dtype."""


class GraphFacts(Protocol):
    """What a graph drive notes beside its observations."""

    @property
    def born(self) -> Sequence[tuple[Any, ...]]:
        """(attribute path, which bucket, ...) of each tensor that first appeared while a graph was captured."""

    @property
    def moved(self) -> tuple[str, ...]:
        """Attribute paths whose tensors planning the last replay replaced."""


class Reruns(Protocol):
    """Re-runs of one backend. Each is a fresh instance; None: it raised, which counts as wrong."""

    def eager(
        self,
        schedule: Schedule,
        step: Step,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        fill: int = POISON,
    ) -> Observation | None:
        """One eager step.

        ``unowned``: what unowned slots hold instead of NaN. ``pattern``: the data pattern instead of the case's own.
        ``fill``: the byte of fresh memory.
        """

    def graph(
        self,
        schedule: Schedule,
        *,
        unowned: float | None = None,
        pattern: str | None = None,
        poison_born: bool = True,
        heal: bool = False,
        fill: int = POISON,
    ) -> tuple[list[Observation], GraphFacts] | None:
        """A whole graph drive without eager steps: its replays in order, and what it noted.

        ``poison_born``: poison what was born in a capture before each replay. ``heal``: give tensors that a plan
        replaced the numbers of their successors.
        """


def of_step(seen: Sequence[Observation], step: Step) -> Observation | None:
    """The observation of ``step``, if it is among ``seen``."""
    return next((observed for observed in seen if observed.step is step), None)
