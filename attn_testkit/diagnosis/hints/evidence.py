"""What is known about one wrong step: what hints are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ...cases.schedule import Schedule, Step
from ...checks.numeric import stacked, wrong_requests, wrong_values
from ...checks.observation import Observation
from ...oracle.expect import Expected
from ..attended_keys import Footprint
from ..swapped_rows import Mixup

__all__ = ["Evidence"]


@dataclass(frozen=True)
class Evidence:
    """What is known about one wrong step."""

    schedule: Schedule
    observed: Observation
    expected: Expected
    footprint: Footprint | None
    passed: list[Observation]
    """Steps of the same case-run that were right."""
    in_graph: bool
    """The eager run of the step is right."""
    mixups: tuple[Mixup, ...] = ()
    """Wrong rows that hold what others should."""
    right_when_fresh: bool = False
    """An eager step after others, and as the first of a fresh instance it is right."""
    reads_foreign: bool = False
    """With zeros instead of NaN in slots of nobody the result is finite."""

    @property
    def step(self) -> Step:
        """The wrong step."""
        return self.observed.step

    @cached_property
    def wrong(self) -> list[int]:
        """Requests that are wrong."""
        return wrong_requests(self.observed, self.expected)

    @cached_property
    def values(self) -> torch.Tensor:
        """[L, T, Hq, Dv] bool: values that are wrong."""
        return wrong_values(self.observed, self.expected)

    @cached_property
    def rows(self) -> list[int]:
        """Flat rows that are wrong."""
        return [int(row) for row in self.values.any(0).flatten(1).any(-1).nonzero().flatten()]

    @property
    def finite(self) -> bool:
        """No NaN and no Inf."""
        return bool(stacked(self.observed, self.expected).isfinite().all())

    @property
    def before(self) -> Step | None:
        """The step that the same instance ran before this one, and that this one is wrong because of."""
        return self.schedule.steps[0] if self.right_when_fresh else None

    @property
    def lens(self) -> list[int]:
        """Keys of each request."""
        return self.step.lens
