"""One step before it has slots."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Fields


@dataclass(frozen=True)
class Plan:
    """One step before it has slots. See ``Step`` for the fields that both have."""

    label: str
    bucket: int
    prefixes: tuple[int, ...]
    """Prefix tokens of each request."""
    eager_too: bool = False
    rotated: int | None = None
    """Lengths are those of the step before, rotated by this number of places."""
    exact: bool = False
    """True for a step that fills its bucket with live requests."""
    new: tuple[int, ...] = ()
    """Extend: new tokens of each request. Empty elsewhere."""
    follows: bool = False
    """Extend: True for the next chunk of the step before it. It has the same requests, and their prefix includes the
    tokens of the step before."""
    encoder_lens: tuple[int, ...] = ()
    """Encoder keys of each request, the first of its prefix. Empty without cross-attention layers."""
    layout: str = ""
    """Order of its slots. Empty: the order of its turn (``steps/variety.py``); the same holds for ``padding`` and
    ``data``."""
    padding: str = ""
    data: str = ""


def most_context(case: Fields) -> int | None:
    """An upper bound of ``context_len``, in tokens, without the steps of the case: they take most of the time of a
    plan, and most cases are far below the context that a backend declares. None if a server variant decides about
    lengths.

    Prefixes of ``cases/plans.py`` are at most two pages and 3 tokens longer than those of the case; encoder keys and
    chunks are added to them, encoder keys in whole pages. A request table may be two pages wider than that.
    """
    if case.variants:
        return None
    longest = max(case.prefixes) + 2 * case.page_size + 3 + case.encoder_len + case.page_size
    if case.draft:
        # A branch begins in the page in which its prefix ends.
        own = case.draft.branches * (case.draft.steps + 2 * case.page_size)
    else:
        own = case.chunks * case.most_new
    return longest + own + 2 * case.page_size + 1
