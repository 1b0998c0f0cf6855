"""KV slots per page."""

from __future__ import annotations

from dataclasses import replace

from ...contract import BackendContext, Capabilities
from ...glossary import Entry
from ..fields import Fields
from .feature import Asked, Bound, Columns, Covered, Feature, Without, Word, of_number
from .numbers import smaller_declared, some_of
from .outside import first_undeclared, pool_like
from .rows import keys_of


def lens_beyond_a_page(page: int) -> tuple[int, ...]:
    """Prefixes of two requests: one longer than a page and than a tile of 16 keys, and one of a few keys."""
    return (max(page, 16) + 5, 3)


def _tried(declared: Capabilities, case: Fields) -> int | None:
    return case.page_size if max(keys_of(case)) > case.page_size else None


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    page = first_undeclared((48, 3, 5, 256), declared.kv_pool.page_sizes)
    if page is None:
        return None
    pool = pool_like(context, page * 2, page)
    return (f"page size {page}", replace(context, page_size=page, kv_pool=pool)) if pool else None


PAGE_SIZE = Feature(
    name="page size",
    order=60,
    fields=("page_size",),
    words=(
        Word(
            r"p(\d+)",
            lambda match, so_far: {"page_size": int(match[1])},
            lambda case: f"p{case.page_size}",
            always=True,
            bounds=(Bound("page size", 1, 1 << 16),),
        ),
    ),
    explained=(
        Entry(
            "p16",
            "Slots per page of the KV pool.",
            also=("page size", "block size"),
            numbers=True,
        ),
    ),
    describe=lambda case: {"page_size": str(case.page_size)},
    declared=(
        Asked(
            lambda case: f"page size {case.page_size}",
            lambda declared, case: case.page_size in declared.kv_pool.page_sizes,
        ),
    ),
    values=Columns(
        lambda declared, mode, tier: {"page_size": some_of(declared.kv_pool.page_sizes, 3 if tier == "smoke" else 5)}
    ),
    covered=(
        Covered(
            "page",
            "page size",
            lambda declared, mode: declared.kv_pool.page_sizes,
            _tried,
            lambda declared, case, page: {"page_size": page, "prefixes": lens_beyond_a_page(page)},
        ),
    ),
    simpler=of_number("page_size", steps=smaller_declared("page_size", lambda declared: declared.kv_pool.page_sizes)),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: {"page_size": draws.one_of(sorted(declared.kv_pool.page_sizes))},
    varies="instance",
    apply=Without("steps/schedule.py lays requests out in pages, and the harness makes a pool with such pages."),
)
