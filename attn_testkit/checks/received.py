"""Memory that an instance received from another one, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from ..cases.features.handed import handed_of
from ..contract import heads_of_rank
from ..contract.state_kind import STATE_KINDS
from ..results.finding import Finding
from .evaluation import Evaluation
from .observation import Observation

_WHATS = (
    "K", "V", "scales of K", "scales of V", "index keys", "index scales", "window", "state",
    "the sender's memory", "memory between slots", "nothing", "unknown",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A head of a row in a pool. -1: it does not apply."""

    what: int
    """Number among ``_WHATS``."""
    layer: int = -1
    """Id of the layer."""
    rank: int = -1
    """Rank of the sender; -1 in the receiver's pools."""
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
    held: Place | None = None
    """Place in the sender's memory with the numbers that are here."""

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


_NUMBERS = [each.name for each in fields(Place) if each.name != "held"]


def as_numbers(wrong: Sequence[Place]) -> torch.Tensor:
    """[n, 2, numbers] int64: places, each with the one that it holds."""
    pairs = ((each, each.held or Place.of("nothing")) for each in wrong)
    rows = [[getattr(one, name) for name in _NUMBERS] for pair in pairs for one in pair]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2, len(_NUMBERS))


def _places(observed: Observation) -> list[Place]:
    found = observed.copies.group("received").get("wrong")
    if found is None:
        return []
    return [Place(*own).holding(Place(*held)) for own, held in found.tolist()]


def received_as_sent(observed: Observation) -> list[Finding]:
    """Check that the memory of requests that were handed over holds the sender's bits, and that no other changed."""
    places = _places(observed)
    if not places:
        return []
    first = places[0]
    others = [f"{each.count} rows of {each.words} of layer {each.layer}" for each in places if each.count > 0]
    return [
        Finding(
            "received-as-sent",
            _headline(first),
            where=_where(observed, first),
            spread=f"wrong: {', '.join(others)}" if others else "",
            hint=_hint(observed, first),
            step=observed.label,
        )
    ]


def _headline(place: Place) -> str:
    if place.words == "the sender's memory":
        return f"the memory of rank {place.rank} of the sender was written"
    if place.words == "memory between slots":
        return "memory between the slots of a pool was written"
    if place.request < 0:
        return f"{place.words} of a slot that is not handed over was written"
    return f"{place.words} of a request that was handed over is not what the sender has"


def _where(observed: Observation, place: Place) -> str:
    if place.layer < 0:
        return ""
    return f"{_row(place)}, head {place.head} of this rank" + _part(observed, place)


def _row(place: Place) -> str:
    if place.request < 0:
        return f"{place.words} of layer {place.layer}, slot {place.token}"
    if place.words in ("window", "state"):
        return f"{place.words} of layer {place.layer}, request {place.request}"
    return f"{place.words} of layer {place.layer}, token {place.token} of request {place.request}"


def _part(observed: Observation, place: Place) -> str:
    if place.words != "window":
        return ""
    return f" in the channels of {STATE_KINDS[observed.schedule.case.heads.family].parts[place.part]}"


def _hint(observed: Observation, place: Place) -> str:
    """Text about the row of the sender that is there instead."""
    held = place.held
    handed = handed_of(observed.schedule.case)
    if held is None or handed is None or place.layer < 0:
        return ""
    if held.words == "nothing":
        return "nothing was stored there: every layer, K and V, and each token from `start` to `end` is handed over"
    if held.words == "unknown":
        return "the numbers there are in no row of the sender: bytes are copied as they are, not converted"
    reasons = []
    if held.words != place.words:
        reasons.append(f"{held.words} and not {place.words}")
    if held.layer != place.layer:
        reasons.append("another layer: pair layers by their ids")
    if (held.request, held.token) != (place.request, place.token) and place.request >= 0:
        reasons.append(
            f"another token: a page has {observed.schedule.case.page_size} slots here, and {handed.page} at the sender"
        )
    if not reasons:
        reasons.append(_of_heads(observed, place, held))
    return f"it holds {_row(held)}, head {held.head}{_part(observed, held)} of rank {held.rank}: {'; '.join(reasons)}"


def _of_heads(observed: Observation, place: Place, held: Place) -> str:
    """Text that names the head of the model that should be there."""
    case, handed = observed.schedule.case, handed_of(observed.schedule.case)
    assert handed is not None
    if held.part != place.part:
        return "the channels of each part are divided among ranks part by part"
    here = case.heads.kv_heads
    if place.words == "state" or (place.words == "window" and place.part == STATE_KINDS[case.heads.family].value_part):
        here = case.heads.q_heads
    total = here * handed.ranks if case.state is not None else handed.total(here)
    rank = case.derived("receiving-rank", handed.ranks)
    own = heads_of_rank(rank, handed.ranks, total)[place.head]
    other = heads_of_rank(held.rank, handed.senders, total)[held.head]
    return (
        f"this is head {other} of the {total} of the model, and head {own} belongs here (rank {rank} of {handed.ranks})"
    )


EVALUATIONS = (
    Evaluation(
        "received-as-sent",
        shown_by=lambda case: bool(case.handed),
        run=lambda comparison, *_: received_as_sent(comparison.observed),
    ),
)
