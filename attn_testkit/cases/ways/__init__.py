"""What not every server does, a file for each: which backends take it, its cases, and what it changes of their steps.

A way is one word of a case's id. What all servers do needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...contract import DIALECTS, Capabilities, Dialect
from ..fields import C, Fields
from .ahead import AHEAD
from .big_pool import BIG_POOL, big_pool_cases
from .far import FAR
from .idle import IDLE
from .lent import LENT
from .many_shapes import MANY_SHAPES
from .more_rows import MORE_ROWS
from .no_rows import NO_ROWS
from .non_causal import NON_CAUSAL
from .verify import BARE, WITH_NEW
from .way import Way

__all__ = ["WAYS", "Way", "big_pool_cases", "dialect_of", "usual_page", "way_cases", "way_of", "ways_that_fit"]

WAYS: Mapping[str, Way] = {
    way.word: way
    for way in (IDLE, NO_ROWS, WITH_NEW, BARE, LENT, MORE_ROWS, FAR, NON_CAUSAL, MANY_SHAPES, BIG_POOL, AHEAD)
}
"""By word, in the order in which their cases stand."""
_USUAL = Way("", "as all servers do it")
_PAGE = 16


def way_of(case: Fields) -> Way:
    """The way of a case."""
    return WAYS[case.way] if case.way else _USUAL


def dialect_of(claims: Capabilities, case: Fields) -> Dialect:
    """How the server of a case speaks to a backend with these claims: as the case has it, else in the usual way, else
    in the one that the backend knows.
    """
    says = way_of(case).says
    usual = {name: next(v for v in values if v in getattr(claims.server, name)) for name, values in DIALECTS.items()}
    return Dialect(**{**usual, **says})


def ways_that_fit(claims: Capabilities, case: Fields) -> list[str]:
    """Words of the ways that a case may have too, on a backend with these claims; none beside parts and KV groups."""
    if case.parts or case.layers.groups or case.rounds or case.mixed:
        return []
    return [way.word for way in WAYS.values() if way.fits(claims, case)]


def usual_page(claims: Capabilities) -> int:
    """Of several slots, where pages have them, and no larger than most servers': page 0 has as many."""
    return max((size for size in claims.page_sizes if size <= _PAGE), default=min(claims.page_sizes))


def way_cases(claims: Capabilities, small: C) -> Iterator[C]:
    """A case for each way that a backend with these claims takes in the mode of ``small``.

    ``small``: a case with as little work for each row and key as is claimed.
    """
    small = replace(small, page_size=usual_page(claims))
    for way in WAYS.values():
        yield from way.cases(claims, small)
