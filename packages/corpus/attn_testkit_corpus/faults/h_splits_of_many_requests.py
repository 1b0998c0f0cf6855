"""Class H: splits that a library makes only of large batches."""

from __future__ import annotations

import torch

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import PlannedBackend

_MANY = 32
_LONG = 300


@fault(
    "general; libraries that split keys from a number of requests on",
    "matches-oracle reads-own-kv",
    modes="decode",
    slug="splits-of-32-requests-drop-the-remainder",
)
class SplitsOfManyRequestsDropTheRemainder(PlannedBackend):
    """The splits of a long request are rounded down in batches of 32 and more, and its last keys are in none."""

    capabilities = LEAN

    def plan_splits(self, lens: torch.Tensor) -> torch.Tensor:
        up = super().plan_splits(lens)
        if len(lens) < _MANY:
            return up
        down = lens // (self.max_splits * self.tile) * self.tile
        return torch.where(lens > _LONG, down.clamp(min=self.tile), up)
