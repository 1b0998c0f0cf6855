"""Memory that an instance received from another one, bit for bit."""

from __future__ import annotations

from ..cases.case import Case
from ..cases.features.handed import Handed, handed_of, state_key_heads
from ..contract import heads_of_rank
from ..contract.state_kind import STATE_KINDS
from ..results.finding import Finding
from .evaluation import Evaluation
from .observation import Observation
from .places import Place, others_in, places_of


def received_as_sent(observed: Observation) -> list[Finding]:
    """Check that the memory of requests that were handed over holds the sender's bits, and that no other changed."""
    places = places_of(observed)
    if not places:
        return []
    first = places[0]
    return [
        Finding(
            "received-as-sent",
            _headline(first),
            where=_where(observed, first),
            spread=others_in(places),
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
    return f"{place.row}, head {place.head} of this rank" + place.in_channels(observed)


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
    return (
        f"it holds {held.row}, head {held.head}{held.in_channels(observed)} of rank {held.rank}: {'; '.join(reasons)}"
    )


def _of_heads(observed: Observation, place: Place, held: Place) -> str:
    """Text that names the head of the model that should be there."""
    case, handed = observed.schedule.case, handed_of(observed.schedule.case)
    assert handed is not None
    if held.part != place.part:
        return "the channels of each part are divided among ranks part by part" + _of_groups(case, handed)
    total = _total(case, handed, place)
    rank = case.derived("receiving-rank", handed.ranks)
    own = heads_of_rank(rank, handed.ranks, total)[place.head]
    other = heads_of_rank(held.rank, handed.senders, total)[held.head]
    return (
        f"this is head {other} of the {total} of the model, and head {own} belongs here (rank {rank} of {handed.ranks})"
    )


def _total(case: Case, handed: Handed, place: Place) -> int:
    """Heads of the model of the kind that a place has."""
    if place.words == "state" or (place.words == "window" and place.part == STATE_KINDS[case.heads.family].value_part):
        return case.heads.q_heads * handed.ranks
    return state_key_heads(case, handed) if place.words == "window" else handed.total(case.heads.kv_heads)


def _of_groups(case: Case, handed: Handed) -> str:
    """Text about groups that ranks share; empty if each is on one rank."""
    groups = state_key_heads(case, handed)
    for side, ranks in (("here", handed.ranks), ("at the sender", handed.senders)):
        if groups < ranks:
            return (
                f". The model has {groups} group{'s' * (groups > 1)}, and {ranks} ranks {side}: each of them has all "
                "channels of B and C of its group"
            )
    return ""


EVALUATIONS = (
    Evaluation(
        "received-as-sent",
        shown_by=lambda case: bool(case.handed),
        run=lambda comparison, *_: received_as_sent(comparison.observed),
    ),
)
