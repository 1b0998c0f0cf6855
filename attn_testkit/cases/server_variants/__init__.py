"""Server variants, a file for each: the backends that take it, its cases, and its changes of their steps.

A server variant is one word of a case's id, and an id may have several. Conventions of all servers need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ...contract import DIALECTS, Capabilities, Dialect
from ..fields import THINGS, C, Fields
from ..plan import Plan
from .big_pool import BIG_POOL, big_index_pool_cases, big_pool_cases
from .context_of_prefixes import CONTEXT_OF_PREFIXES
from .empty_batches import EMPTY_BATCHES
from .large_max_context_len import LARGE_MAX_CONTEXT_LEN
from .many_shapes import MANY_BATCH_SHAPES
from .narrower_widths import MIN_WIDTH, NARROWER_WIDTHS, narrower, rows_of_width, shares_widths, width_of
from .non_causal import NON_CAUSAL
from .out_given import OUT_GIVEN
from .overlap_scheduling import OVERLAP_SCHEDULING
from .padded_tokens import PADDED_TOKENS
from .piecewise import PIECEWISE
from .unused_scales import UNUSED_SCALES_VARIANT
from .variant import ServerVariant
from .verify import NO_TREE_TENSORS, SEQ_LENS_WITH_NEW
from .wide_scores import WIDE_SCORES, wide_scores_cases
from .zero_length_padding import ZERO_LENGTH_PADDING

__all__ = [
    "MIN_WIDTH",
    "SERVER_VARIANTS",
    "ServerVariant",
    "all_fit",
    "big_index_pool_cases",
    "big_pool_cases",
    "dialect_of",
    "excluded",
    "narrower",
    "rows_of_width",
    "shares_widths",
    "usual_page",
    "variant_cases",
    "variant_of",
    "wide_scores_cases",
    "width_of",
]

SERVER_VARIANTS: Mapping[str, ServerVariant] = {
    variant.word: variant
    for variant in (
        EMPTY_BATCHES,
        ZERO_LENGTH_PADDING,
        SEQ_LENS_WITH_NEW,
        NO_TREE_TENSORS,
        OUT_GIVEN,
        PADDED_TOKENS,
        LARGE_MAX_CONTEXT_LEN,
        NON_CAUSAL,
        MANY_BATCH_SHAPES,
        BIG_POOL,
        OVERLAP_SCHEDULING,
        PIECEWISE,
        UNUSED_SCALES_VARIANT,
        NARROWER_WIDTHS,
        CONTEXT_OF_PREFIXES,
        WIDE_SCORES,
    )
}
"""Server variants by word, in the order of their cases and of the words of an id."""
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
        plans=plans,
        context_len=max((variant.context_len for variant in variants), default=0),
        says={name: value for variant in variants for name, value in variant.says.items()},
        gives_none=any(variant.gives_none for variant in variants),
        causal=all(variant.causal for variant in variants),
        pool_elements=max((variant.pool_elements for variant in variants), default=0),
    )


def variant_of(case: Fields) -> ServerVariant:
    """Sum of the server variants of a case; without any, habits that all servers have."""
    return _together(case.variants)


def excluded(case: Fields) -> str:
    """Reason why no case has what this one has together with a server variant; empty if there is none."""
    for word in sorted(case.variants):
        for name, why in SERVER_VARIANTS[word].excludes.items():
            if THINGS[name](case) if name in THINGS else name in case.variants:
                return f"{word} excludes {name}: {why}"
    return ""


def all_fit(declared: Capabilities, case: Fields) -> bool:
    """True if a backend with these capabilities may be asked for each server variant of a case."""
    return all(
        variant.needs_no_capability or variant.fits(declared, case)
        for variant in (SERVER_VARIANTS[word] for word in case.variants)
    )


def dialect_of(declared: Capabilities, case: Fields) -> Dialect:
    """Conventions of a case's server for a backend with these capabilities: those of the case, else the usual ones,
    else those that the backend knows.
    """
    says = variant_of(case).says
    usual = {name: next(v for v in values if v in getattr(declared.server, name)) for name, values in DIALECTS.items()}
    return Dialect(**{**usual, **says})


def usual_page(declared: Capabilities) -> int:
    """Page size of several slots, if pages have them, and no larger than most servers': page 0 has as many."""
    return max((size for size in declared.page_sizes if size <= _PAGE), default=min(declared.page_sizes))


def variant_cases(declared: Capabilities, small: C) -> Iterator[C]:
    """A case for each variant that a backend with these capabilities has in the mode of ``small``.

    ``small``: a case with as little work for each row and key as is declared.
    """
    small = small.with_changes(page_size=usual_page(declared))
    for variant in SERVER_VARIANTS.values():
        yield from variant.cases(declared, small)
