"""Rows of one forward of a draft with the lengths of another."""

from __future__ import annotations

from .evidence import Evidence
from .hint import Level, hint


@hint(Level.SHOWN, silences=("elsewhere", "read_twice", "masked_too_late"))
def lengths_of_the_last_forward(e: Evidence) -> str:
    """All forwards but the last are wrong, and slots after a row have the weight of the tokens of later forwards."""
    attended, draft = e.attended, e.schedule.case.draft
    if draft is None or attended is None or attended.used != attended.wanted or attended.doubled or attended.heads:
        return ""
    depth = [d for request in e.step.requests if request.draft is not None for d in request.draft.depths]
    last = max(depth, default=0)
    if len(depth) != e.step.tokens or e.rows != [row for row, d in enumerate(depth) if d < last]:
        return ""
    request = e.step.requests[attended.request]
    assert request.draft is not None
    later = last - request.draft.depths[attended.row]
    seen = len(attended.wanted)
    if abs(sum(attended.elsewhere.values()) - later / (seen + later)) >= 0.5 / (seen + later):
        return ""
    return (
        "all forwards of a draft probably use the lengths of the last one: the rows of the last one are right, and a "
        "row "
        f"{later} forward{'s' if later > 1 else ''} before it gives weight to {later} slot{'s' if later > 1 else ''} "
        "that later forwards fill"
    )
