"""Class R, epsilon: norms of queries and keys that are as short as the epsilon of their norm."""

from __future__ import annotations

from .catalogue import fault
from .states import StateParent


@fault(
    "general (the epsilon of a model's RMS norm where that of the kernel is meant)",
    "matches-oracle state-matches-oracle",
    "look at that epsilon",
)
class EpsilonTooLarge(StateParent):
    """Queries and keys are divided by the root of the sum of squares plus 1.28e-4, and not plus 1e-6."""

    epsilon = 1.28e-4


@fault("general (a norm without an epsilon)", "matches-oracle state-matches-oracle", "look at that epsilon")
class EpsilonLeftOut(StateParent):
    """Queries and keys are divided by their length, with a smallest number that only prevents 0 / 0."""

    epsilon = 1e-20
