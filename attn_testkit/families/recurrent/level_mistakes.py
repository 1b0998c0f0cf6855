"""Usual mistakes of backends of log-linear attention, and the data that such a backend reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .data import StateStepData
from .levels import LevelSlip

LEVEL_SLIPS: Mapping[LevelSlip, str] = {
    "not cleared": "levels that merge into a higher one are not cleared, so their tokens count twice",
    "one too few": "a carry ends one level too early: the highest full level stays, and the lower ones merge into it",
    "weight below": "each level has the weight of the level below it: the first weight is that of the token itself",
    "weight above": "each level has the weight of the level above it: the first weight is that of the token itself",
    "prefix only": "all rows use the levels of the first row: they follow from the tokens before the step, without "
    "those of the step",
    "new tokens only": "levels follow from the tokens of the step, without those before it: the carry of the tokens "
    "before the step is forgotten",
    "with the token": "levels follow from a length that is one too large: a row counts itself before it is read",
}
"""Mistake -> description of a backend that makes it."""


def mistaken_levels(data: StateStepData) -> Iterator[tuple[str, StateStepData]]:
    """Mistakes in levels; none for layers of other kinds."""
    for slip, text in LEVEL_SLIPS.items() if data.layers[0].of_kind.leveled else ():
        yield text, replace(data, level_slip=slip)
