"""A check: its id, its texts, when it applies, and at which stage it has been evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ..cases.case import Case
from ..contract import Capabilities, Execution
from ..results.finding import Finding
from ..steps.schedule import Schedule
from .comparison import Comparison


class Stage(IntEnum):
    """The stage that a case-run has reached."""

    STARTED = 0
    CONSTRUCTED = 1
    """The backend's constructor has returned."""
    OBSERVED = 2
    """One or more steps, eager or replayed, were observed and evaluated."""
    CAPTURED = 3
    """All graphs are captured."""
    REPLAYED = 4
    """One or more replays were observed and evaluated."""
    COMPLETED = 5
    """Everything that was planned happened."""


Run = Callable[[Comparison, Schedule, Capabilities], list[Finding]]
"""A function that evaluates one observed step, with the step's schedule."""


def always(declared: Capabilities, execution: Execution) -> bool:
    """True for every case-run."""
    return True


def in_eager(declared: Capabilities, execution: Execution) -> bool:
    """True for eager case-runs."""
    return execution is Execution.EAGER


def in_graphs(declared: Capabilities, execution: Execution) -> bool:
    """True for graph case-runs."""
    return execution is Execution.GRAPH


@dataclass(frozen=True)
class Check:
    """One property that the kit checks, with all texts about it."""

    id: str
    """The stable id: known-failures files and results name it."""
    text: str
    """The property that a backend must have."""
    cause: str
    """Usual causes of a failure: where to look first."""
    source: str
    """Real bugs of the kind."""
    how_to_read: str
    """Advice on reading its failure."""
    evaluated_from: Stage
    """The stage that a case-run must have reached for the check to have been evaluated at all."""
    applies: Callable[[Capabilities, Execution], bool] = always
    shown_by: Callable[[Case], bool] = lambda case: True
    """True if a case can show it: a single request has no other requests that could change its bits."""
    behind_outputs: bool = False
    """True if it is not evaluated when attention outputs are wrong, because its failure would follow from them."""
    against_eager: bool = False
    """True if it compares replays with eager runs, so that a mode declared only for graphs cannot be evaluated."""
    run: Run | None = None
    """The function that evaluates a step; None if a run, a comparison of runs, or diagnosis finds failures."""

    @property
    def words(self) -> dict[str, str]:
        """The texts of the check, for readers without the kit."""
        return {"text": self.text, "cause": self.cause, "source": self.source, "how_to_read": self.how_to_read}
