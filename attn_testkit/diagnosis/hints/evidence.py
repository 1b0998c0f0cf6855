"""What is known about one wrong step: what hints are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...cases.data import StepData
from ...cases.schedule import Schedule, Step
from ...checks import Judgement
from ...checks.observation import Observation
from ...contract import HeadShape
from ...oracle.expect import Expected, attend_with_limit
from ..attended_keys import AttendedKeys
from ..changed_case import ChangedCases
from ..swapped_rows import SwappedRow

__all__ = ["LONGEST", "SMALLEST_TILE", "SMALL_ERROR", "Evidence", "places_of"]

SMALLEST_TILE = 16
"""No kernel's tile of keys is smaller."""
SMALL_ERROR = 5.0
"""Errors up to so many limits are what one rounding too many gives."""
LONGEST = 8192
"""KV tokens of a request up to which it is asked what other data give: each mistake costs an answer of the oracle."""


@dataclass(frozen=True)
class Evidence:
    """What is known about one wrong step."""

    schedule: Schedule
    judgement: Judgement
    attended: AttendedKeys | None
    """What one wrong row attended to; None: the backend would not say."""
    passed: list[Observation]
    """Steps of the same case-run that were right."""
    in_graph: bool
    """The eager run of the step is right."""
    swapped: tuple[SwappedRow, ...] = ()
    """Wrong rows that hold what others should."""
    right_when_fresh: bool = False
    """An eager step after others, and as the first of a fresh instance it is right."""
    computes_nan: bool = False
    """NaN stays with zeros in unowned slots, and with another fill of fresh memory."""
    right_when_alone: bool = False
    """A replay after others, and as the only one it is right."""
    reads_foreign: bool = False
    """With zeros instead of NaN in unowned slots the result is finite."""
    right_with_zeros: bool = False
    """And not only finite."""
    changed: ChangedCases | None = None
    """Asks for other cases, where the step is wrong on a fresh instance in eager."""

    @property
    def observed(self) -> Observation:
        """What was seen of it."""
        return self.judgement.observed

    @property
    def expected(self) -> Expected:
        """What it should have given."""
        return self.judgement.expected

    @property
    def step(self) -> Step:
        """The wrong step."""
        return self.observed.step

    @property
    def wrong(self) -> list[int]:
        """Requests that are wrong, ascending."""
        return list(self.judgement.wrong_requests)

    @property
    def rows(self) -> list[int]:
        """Flat rows that are wrong, ascending."""
        return list(self.judgement.wrong_rows)

    @property
    def wrong_shapes(self) -> list[HeadShape]:
        """Of the heads of layers that are wrong."""
        case, layers = self.schedule.case, [place for place, bad in enumerate(self.wrong_layers) if bad]
        return list(dict.fromkeys(case.head_maps[i].layer if case.head_maps else case.head_shape for i in layers))

    @property
    def wrong_layers(self) -> list[bool]:
        """Of each layer, in the order in which they run, whether a number of it is wrong."""
        wrong: list[bool] = self.judgement.wrong.flatten(1).any(-1).tolist()
        return wrong

    @property
    def before(self) -> Step | None:
        """The step that the same instance ran before this one, and that this one is wrong because of."""
        if self.right_when_fresh:
            return self.schedule.steps[0]
        steps = self.schedule.steps
        return steps[steps.index(self.step) - 1] if self.right_when_alone and self.step in steps[1:] else None

    @property
    def lens(self) -> list[int]:
        """KV tokens of each request, those of this step included."""
        return self.step.lens

    @property
    def can_be_asked(self) -> bool:
        """Whether ``right_for`` can tell anything: of wrong, finite results of an eager step without long requests."""
        judgement = self.judgement
        asked = not self.schedule.case.head_maps and max(self.lens, default=0) <= LONGEST
        wrong = judgement.all_finite and not judgement.right and judgement.worst is not None
        return asked and wrong and not self.in_graph

    def right_for(self, data: StepData, *, right_too: bool = False, of_rows: torch.Tensor | None = None) -> bool:
        """Whether every wrong row of a layer is what attention on other data gives; ``right_too``: every row.

        ``of_rows`` [T] bool: of these alone.
        """
        given = self.schedule.new_rows_as_given and not self.step.stored
        want, limit = attend_with_limit(self.schedule, data, given)
        out = self.judgement.out.double()
        # Of a row that sees no KV token the oracle has NaN, and a backend 0.
        near = (((out - want.out).abs() <= limit) | (want.out.isnan() & (out == 0))).flatten(2).all(-1)
        if of_rows is not None:
            near = near | ~of_rows
        return bool((near if right_too else near[self.judgement.wrong.flatten(2).any(-1)]).all())


def places_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each flat row: its request, its number there, and how many rows that request has."""
    return [(b, i, n) for b, n in enumerate(counts) for i in range(n)]
