"""What not every server does, a file for each: which backends take it, its cases, and what it changes of their steps.

A server variant is one word of a case's id, and an id may have several. What all servers do needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from ...contract import DIALECTS, Capabilities, Dialect
from ..fields import THINGS, C, Fields
from ..plan import Plan
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

__all__ = ["WAYS", "Way", "all_fit", "big_pool_cases", "dialect_of", "excluded", "usual_page", "way_cases", "way_of"]

WAYS: Mapping[str, Way] = {
    way.word: way
    for way in (IDLE, NO_ROWS, WITH_NEW, BARE, LENT, MORE_ROWS, FAR, NON_CAUSAL, MANY_SHAPES, BIG_POOL, AHEAD)
}
"""By word, in the order in which their cases and the words of an id stand."""
_PAGE = 16


@lru_cache(maxsize=256)
def _together(words: frozenset[str]) -> Way:
    ways = [way for word, way in WAYS.items() if word in words]

    def plans(case: Fields, plans: list[Plan]) -> list[Plan]:
        for way in ways:
            plans = way.plans(case, plans)
        return plans

    return Way(
        "-".join(way.word for way in ways),
        "; ".join(f"{way.about} ({way.claim})" if way.claim else way.about for way in ways),
        plans=plans,
        context_len=max((way.context_len for way in ways), default=0),
        says={name: value for way in ways for name, value in way.says.items()},
        gives_none=any(way.gives_none for way in ways),
        causal=all(way.causal for way in ways),
        pool_elements=max((way.pool_elements for way in ways), default=0),
    )


def way_of(case: Fields) -> Way:
    """Sum of the server variants of a case; without any, habits that all servers have."""
    return _together(case.variants)


def excluded(case: Fields) -> str:
    """Reason why no case has what this one has together with a server variant; empty if there is none."""
    for word in sorted(case.variants):
        for name, why in WAYS[word].excludes.items():
            if THINGS[name](case) if name in THINGS else name in case.variants:
                return f"{word} excludes {name}: {why}"
    return ""


def all_fit(claims: Capabilities, case: Fields) -> bool:
    """True if a backend with these capabilities may be asked for each server variant of a case."""
    return all(way.needs_no_claim or way.fits(claims, case) for way in (WAYS[word] for word in case.variants))


def dialect_of(claims: Capabilities, case: Fields) -> Dialect:
    """How the server of a case speaks to a backend with these claims: as the case has it, else in the usual way, else
    in the one that the backend knows.
    """
    says = way_of(case).says
    usual = {name: next(v for v in values if v in getattr(claims.server, name)) for name, values in DIALECTS.items()}
    return Dialect(**{**usual, **says})


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
