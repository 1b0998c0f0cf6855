"""The table of server variants: those of the modules next to this one.

A server variant is one word of a case's id, and an id may have several. A convention that all servers share is not a
variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from ....contract import DIALECTS, Capabilities, Dialect
from ...fields import C, Fields
from ...plan import Plan
from ...traits import Trait, add_traits
from ..found import found_next_to
from .variant import ServerVariant

SERVER_VARIANTS: Mapping[str, ServerVariant] = {each.word: each for each in found_next_to(__name__, ServerVariant)}
"""Server variants by word, in the order of their cases and of the words of an id."""


def _has(word: str) -> Callable[[Fields], bool]:
    return lambda case: word in case.variants


add_traits(Trait(word, _has(word), each.excludes) for word, each in SERVER_VARIANTS.items())
_PAGE = 16


@lru_cache(maxsize=256)
def _together(words: frozenset[str]) -> ServerVariant:
    variants = [variant for word, variant in SERVER_VARIANTS.items() if word in words]

    def plans(case: Fields, plans: list[Plan]) -> list[Plan]:
        for variant in variants:
            plans = variant.plans(case, plans)
        return plans

    return ServerVariant(
        "-".join(variant.word for variant in variants),
        "; ".join(
            f"{variant.about} ({variant.capability})" if variant.capability else variant.about for variant in variants
        ),
        order=0,
        plans=plans,
        context_len=max((variant.context_len for variant in variants), default=0),
        says={name: value for variant in variants for name, value in variant.says.items()},
        gives_none=any(variant.gives_none for variant in variants),
        causal=all(variant.causal for variant in variants),
        eager_only={mode: why for variant in variants for mode, why in variant.eager_only.items()},
        pool_elements=max((variant.pool_elements for variant in variants), default=0),
    )


def variant_of(case: Fields) -> ServerVariant:
    """The combined server variants of a case; without any, the conventions that all servers have."""
    return _together(case.variants)


def all_fit(declared: Capabilities, case: Fields) -> bool:
    """True if a backend with these capabilities may be asked for each server variant of a case."""
    return all(
        variant.needs_no_capability or variant.fits(declared, case)
        for variant in (SERVER_VARIANTS[word] for word in case.variants)
    )


def on_its_instance(case: C) -> list[C]:
    """Other cases on the instance of ``case``, by its server variants."""
    return [other for word in sorted(case.variants) for other in SERVER_VARIANTS[word].on_its_instance(case)]


def dialect_of(declared: Capabilities, case: Fields) -> Dialect:
    """Conventions of a case's server for a backend with these capabilities: those of the case, else the usual ones,
    else those that the backend knows.
    """
    says = variant_of(case).says
    usual = {name: next(v for v in values if v in getattr(declared.server, name)) for name, values in DIALECTS.items()}
    return Dialect(**{**usual, **says})


def usual_page(declared: Capabilities) -> int:
    """A declared page size of several slots, if there is one, but no larger than in most servers: page 0 has as many
    slots."""
    return max(
        (size for size in declared.kv_pool.page_sizes if size <= _PAGE), default=min(declared.kv_pool.page_sizes)
    )


def variant_cases(declared: Capabilities, small: C) -> Iterator[C]:
    """A case for each variant that a backend with these capabilities supports in the mode of ``small``. ``small``: a
    case with as little work for each row and key as the declaration allows.
    """
    small = small.with_changes(page_size=usual_page(declared))
    for variant in SERVER_VARIANTS.values():
        yield from variant.cases(declared, small)
