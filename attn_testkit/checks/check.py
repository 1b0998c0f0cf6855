"""What a check is: an id, the words about it, when it applies, and from where on it was judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ..cases.case import Case
from ..cases.schedule import Schedule
from ..contract import Capabilities, Execution
from ..results import Finding
from .judgement import Judgement

__all__ = ["Check", "Run", "Stage", "always", "in_eager", "in_graphs"]


class Stage(IntEnum):
    """How far a case-run has come."""

    STARTED = 0
    CONSTRUCTED = 1
    """The backend's constructor has returned."""
    OBSERVED = 2
    """At least one step, eager or replayed, was observed and judged."""
    CAPTURED = 3
    """All graphs are captured."""
    REPLAYED = 4
    """At least one replay was observed and judged."""
    COMPLETED = 5
    """All that was due happened."""


Run = Callable[[Judgement, Schedule, Capabilities], list[Finding]]
"""Judges one observed step. The schedule is the one that the step is of."""


def always(claims: Capabilities, execution: Execution) -> bool:
    """Applies to every case-run."""
    return True


def in_eager(claims: Capabilities, execution: Execution) -> bool:
    """Applies to eager case-runs."""
    return execution is Execution.EAGER


def in_graphs(claims: Capabilities, execution: Execution) -> bool:
    """Applies to graph case-runs."""
    return execution is Execution.GRAPH


@dataclass(frozen=True)
class Check:
    """One thing that the kit checks, with all that is said about it anywhere."""

    id: str
    """Stable: files of known failures and records name it."""
    text: str
    """What a backend must do."""
    cause: str
    """What usually breaks it: where to look first."""
    source: str
    """Real bugs of the kind."""
    how_to_read: str
    """How to read its failure."""
    judged_from: Stage
    """How far a case-run must have come for the check to have been judged at all."""
    applies: Callable[[Capabilities, Execution], bool] = always
    shown_by: Callable[[Case], bool] = lambda case: True
    """Whether a case can show it: one request has no company in which it could give other bits."""
    behind_outputs: bool = False
    """With wrong attention outputs it is not judged: what is wrong then follows from them, or has one cause."""
    against_eager: bool = False
    """It holds replays against eager runs: it is not judged in a mode that is claimed in graphs alone."""
    run: Run | None = None
    """None: found while driving, by comparing runs, or by diagnosis."""

    @property
    def words(self) -> dict[str, str]:
        """What is said about it, for those who have no kit at hand."""
        return {"text": self.text, "cause": self.cause, "source": self.source, "how_to_read": self.how_to_read}
