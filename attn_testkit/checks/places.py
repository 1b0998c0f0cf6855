"""Places of memory that was moved, from another instance or from the host, and that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from ..contract.state_kind import STATE_KINDS
from .observation import Observation

_WHATS = (
    "K", "V", "scales of K", "scales of V", "index keys", "index scales", "window", "state",
    "the sender's memory", "memory between slots", "the host's memory", "nothing", "unknown",
)  # fmt: skip
STAGES = ("received", "left", "came back", "left in flight", "came back in flight")
"""Times at which rows are compared, ``Place.stage``: after memory was received, left, came back, and so on."""


@dataclass(frozen=True)
class Place:
    """A head of a row in a pool. -1: it does not apply."""

    what: int
    """Number among ``_WHATS``."""
    layer: int = -1
    """Id of the layer."""
    rank: int = -1
    """Rank of the sender; -1 in other pools."""
    request: int = -1
    """Request of the step; -1 for a slot of no such request."""
    token: int = -1
    """Token of the request, or the slot. Of a state the tokens that it includes."""
    part: int = -1
    """Number of the part of a row: in a window of q, k and v."""
    head: int = -1
    """Head in its part."""
    count: int = -1
    """Rows of this layer that are wrong."""
    stage: int = 0
    """Number among ``STAGES``."""
    held: Place | None = None
    """Place from which the numbers are that are here."""

    @classmethod
    def of(cls, what: str, **more: Any) -> Self:
        """A place, by words."""
        return cls(_WHATS.index(what), **more)

    def holding(self, held: Place) -> Place:
        """The place, with the place from which its numbers are."""
        return replace(self, held=held)

    @property
    def words(self) -> str:
        """Name of the kind of row."""
        return _WHATS[self.what]

    @property
    def row(self) -> str:
        """The row in words."""
        if self.request < 0:
            return f"{self.words} of layer {self.layer}, slot {self.token}"
        if self.words in ("window", "state"):
            return f"{self.words} of layer {self.layer}, request {self.request}"
        return f"{self.words} of layer {self.layer}, token {self.token} of request {self.request}"

    def in_channels(self, observed: Observation) -> str:
        """The part of a window, in words; empty for other rows."""
        if self.words != "window":
            return ""
        return f" in the channels of {STATE_KINDS[observed.schedule.case.heads.family].parts[self.part]}"


_NUMBERS = [each.name for each in fields(Place) if each.name != "held"]


def as_numbers(wrong: Sequence[Place]) -> torch.Tensor:
    """[n, 2, numbers] int64: places, each with the one that it holds."""
    pairs = ((each, each.held or Place.of("nothing")) for each in wrong)
    rows = [[getattr(one, name) for name in _NUMBERS] for pair in pairs for one in pair]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2, len(_NUMBERS))


def places_of(observed: Observation) -> list[Place]:
    """Wrong places, the causes first."""
    found = observed.copies.group("moved").get("wrong")
    if found is None:
        return []
    return [Place(*own).holding(Place(*held)) for own, held in found.tolist()]


def others_in(places: Sequence[Place]) -> str:
    """Text with the number of wrong rows of each kind; empty if none is in a row."""
    found = [f"{each.count} rows of {each.words} of layer {each.layer}" for each in places if each.count > 0]
    return f"wrong: {', '.join(found)}" if found else ""
