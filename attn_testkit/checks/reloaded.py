"""Memory that left to the host and came back, bit for bit."""

from __future__ import annotations

from ..results.finding import Finding
from .evaluation import Evaluation
from .observation import Observation
from .places import STAGES, Place, others_in, places_of


def reloaded_as_left(observed: Observation) -> list[Finding]:
    """Check that the host got the bits that left, that the device got the same back, and that no other memory
    changed."""
    places = places_of(observed)
    if not places:
        return []
    first = places[0]
    return [
        Finding(
            "reloaded-as-left",
            _headline(first),
            where=_where(observed, first),
            spread=others_in([place for place in places if place.stage == first.stage]),
            hint=_hint(observed, first),
            step=observed.label,
        )
    ]


def _headline(place: Place) -> str:
    stage = STAGES[place.stage]
    if place.words == "the host's memory":
        return "a reload wrote the host's memory"
    if place.words == "memory between slots":
        return "memory between the slots of a pool was written"
    flight = ", while a step was in flight" * stage.endswith("in flight")
    if stage.startswith("left"):
        if place.request < 0:
            return f"{place.words} of a host slot to which nothing left was written{flight}"
        return f"the host does not have {place.words} of a request that left{flight}"
    if place.request < 0:
        return f"{place.words} of a device slot to which nothing came back was written{flight}"
    return f"{place.words} of a request that came back is not what the host has{flight}"


def _where(observed: Observation, place: Place) -> str:
    if place.layer < 0:
        return ""
    return f"{place.row}" + (f", head {place.head}" if place.head >= 0 else "") + place.in_channels(observed)


def _hint(observed: Observation, place: Place) -> str:
    """Text about the row that is there instead."""
    held = place.held
    if held is None or place.layer < 0:
        return ""
    left = STAGES[place.stage].startswith("left")
    if held.words == "nothing":
        return _of_nothing(place, left=left)
    if held.words == "unknown":
        if STAGES[place.stage] == "left in flight":
            return "the numbers there are older: copies to the host come after the work that stores the rows"
        return "the numbers there are in no row that left: bytes are copied as they are, by the layout's strides"
    case = observed.schedule.case
    reasons = []
    if held.words != place.words:
        reasons.append(f"{held.words} and not {place.words}")
    if held.layer != place.layer:
        reasons.append(f"another layer: {case.offload} has its own strides of layers")
    if place.request < 0:
        reasons.append("this slot is not named")
    elif (held.request, held.token) != (place.request, place.token):
        reasons.append(
            f"another token: a page has {case.page_size} slots, and slots of host and device are numbered apart"
        )
    if held.head != place.head and not reasons:
        reasons.append("another head: a row has heads before numbers, in whatever order the pool has them")
    return f"it holds {held.row}, head {held.head}{held.in_channels(observed)}: {'; '.join(reasons)}"


def _of_nothing(place: Place, *, left: bool) -> str:
    if place.request < 0:
        return "it was overwritten with what a slot holds that nobody uses"
    what = "every layer, K and V, scales, index keys, states, and each token of the last page"
    if left:
        return f"nothing was stored there when the event was done: {what}, before the device slots are used again"
    return f"nothing was stored there when the event was done: {what}, in the slots that the transfer names"


EVALUATIONS = (
    Evaluation(
        "reloaded-as-left",
        shown_by=lambda case: bool(case.offload),
        run=lambda comparison, *_: reloaded_as_left(comparison.observed),
    ),
)
