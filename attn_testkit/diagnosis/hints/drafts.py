"""What drafts alone can have wrong."""

from __future__ import annotations

from .evidence import Evidence

__all__ = ["only_empty_prefixes"]


def only_empty_prefixes(e: Evidence) -> str:
    """Wrong are exactly the requests of a draft that have no key before it, which servers have not."""
    if e.schedule.case.draft is None or not e.wrong:
        return ""
    empty = [i for i, request in enumerate(e.step.requests) if request.prefix == 0]
    if e.wrong != empty or len(empty) == e.step.bs:
        return ""
    return (
        "only requests without a prefix differ: servers draft behind a prefill and have none; if planning counts on "
        "that, claim drafts_without_prefix=False"
    )
