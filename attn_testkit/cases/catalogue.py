"""Which cases a tier tries: a covering array over what a backend claims, and a few named cases beside it.

``smoke`` meets every value of every dimension once, ``core`` every pair of values, ``full`` every triple. Dimensions
hold only what is claimed, so that a claim is tried and nothing else is; and of long claims some values alone. From core
on the other values get a small case each (``small_cases.py``); what is left even so is named (``untried.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cachetools import LRUCache, cached

from ..contract import Capabilities, ForwardMode
from .as_claimed import as_claimed
from .case import DATA, LAYOUTS, PADDINGS, Case, Heads
from .claimed_pairs import claimed_pair_cases
from .code_cases import code_cases
from .companions import accepted, claimed_companions, head_layouts, some_of
from .company import company_cases
from .covering import covering_array
from .draft import Draft
from .enriched import enriched, varied
from .extend import NEW_TOKENS, new_tokens, room_for
from .extremes import extreme_cases
from .large_cases import large_cases
from .layer_cases import layer_cases
from .named import MOST_USUAL_ROWS, named_cases, named_from, smallest_of, without_options_of
from .one_head import one_head_cases
from .options_together import options_together_cases
from .page_counts import page_count_cases
from .pair_array import layout_array_cases, pair_array_cases
from .parts import part_cases
from .plans import context_len
from .pool_layouts import pool_layout_cases, usual_layout
from .row_edges import row_edge_cases
from .shared_prefixes import shared_prefix_cases
from .small_cases import plain_case, small_cases
from .switches import switch_cases
from .three_kv_heads import three_kv_heads_cases
from .trees import Tree, chain
from .uniform_batches import uniform_batch_cases
from .ways import big_pool_cases, way_cases

__all__ = ["TIERS", "generate", "within_claims"]

TIERS: Mapping[str, int] = {"smoke": 1, "core": 2, "full": 3}
"""Tier -> strength of the covering array."""

_TREES: tuple[Tree, ...] = (
    chain(4),
    Tree((0, 0, 1, 1, 3)),
    Tree((0, 1, 0, 3, 0, 5, 1)),
    Tree((0, 0, 0)),
)
_DRAFTS = (Draft(1, 4), Draft(2, 3), Draft(1, 2), Draft(4, 2), Draft(3, 6), Draft(1, 7))


@dataclass(frozen=True)
class _Prefixes:
    """Prefix lengths as a function of the page size and of the rows of a request."""

    name: str

    def lens(self, page: int, width: int) -> tuple[int, ...]:
        unit, half = max(page, 8), width // 2
        return {
            "edges": (unit - 1, unit, unit + 1),
            "zero": (0, 1, unit),
            "ragged": (3, 2 * unit + 5, unit // 2 + 1, 17),
            "one": (unit + 5,),
            "same": (7, 7),
            "wide": (1, 2, 5, 9, 14, 2, 30),
            "long": (300, 70, 12),
            # The rows of a request lie on both sides of a multiple of the usual key tiles.
            "tiles": (32 - half, 128 - half, 64 - half, 16 - half),
        }[self.name]


_PREFIXES = ("edges", "zero", "ragged", "one", "same", "wide", "long", "tiles")
_ACCEPTED = ("uneven", "one", "all")


def _windows(claims: Capabilities, mode: ForwardMode) -> list[int]:
    # 46: W + 1 keys end just below a multiple of 16, and W + the rows of a request lie beyond it.
    windows = dict.fromkeys(max(window, claims.min_window) for window in (0, 4, 11, 46, 4000))
    return [-1, *windows] if mode in claims.sliding_window else [-1]


def _rows_dimension(claims: Capabilities, mode: ForwardMode) -> dict[str, list[Any]]:
    rows = claims.max_q_rows
    if mode is ForwardMode.DECODE:
        return {}
    if mode is ForwardMode.EXTEND:
        return {"new_tokens": list(NEW_TOKENS), "chunks": [3, 1]}
    if mode is ForwardMode.DRAFT_DECODE:
        return {"draft": [draft for draft in _DRAFTS if draft.branches <= claims.max_draft_branches]}
    if mode is ForwardMode.TARGET_VERIFY:
        chains = [chain(min(n, rows)) for n in (2, 4, 7)]
        trees = [t for t in _TREES if len(t) <= rows and t.topk <= claims.max_topk]
        return {"tree": list(dict.fromkeys([*chains, *trees]))}
    widths = sorted({min(n, rows) for n in (2, 4, MOST_USUAL_ROWS)})
    return {"width": widths, "accepted": list(_ACCEPTED)}


def _dimensions(claims: Capabilities, mode: ForwardMode, tier: str) -> dict[str, list[Any]]:
    mla_only = claims.families == {"mla"}
    head_dims = [d for d in claims.head_dims if d <= 512]
    count = 2 if tier == "smoke" else 3
    dimensions: dict[str, list[Any]] = {
        "heads": head_layouts(claims),
        "head_dim": some_of(head_dims if mla_only else [d for d in head_dims if d <= 256] or head_dims, count),
        "dtype": sorted(claims.dtypes),
        "kv_dtype": sorted(claims.kv_dtypes, reverse=True),
        "page_size": some_of(claims.page_sizes, 3 if tier == "smoke" else 5),
        "prefixes": list(_PREFIXES),
        "layout": list(LAYOUTS),
        "data": list(DATA),
        "window": _windows(claims, mode),
        "logit_cap": [0.0, 1.5] if claims.logit_cap else [0.0],
        "sinks": [False, True] if claims.sinks else [False],
        "slack": [0, 1, 3],
        "padding": list(PADDINGS),
        **_rows_dimension(claims, mode),
    }
    if "mla" in claims.families:
        dimensions["rope_dim"] = sorted(claims.mla_rope_dims)
    return dimensions


def within_claims(claims: Capabilities, case: Case) -> bool:
    """Whether the case, and all cases that share its instance, keep within what is claimed of lengths and windows."""
    if case.window >= 0 and case.topk > 1 and not claims.window_in_trees:
        return False
    others = claimed_companions(claims, case, claims.graph | claims.eager) if case.mixed else []
    return all(context_len(each) <= claims.max_context_len for each in (case, *others))


def _build(claims: Capabilities, mode: ForwardMode, row: Mapping[str, Any]) -> Case:
    heads: Heads = row["heads"]
    mla = heads.family == "mla"
    tree: Tree | None = row.get("tree")
    draft: Draft | None = row.get("draft")
    width = len(tree or draft or ()) or row.get("width", 1)
    prefixes = _Prefixes(row["prefixes"]).lens(row["page_size"], draft.steps if draft else width)
    new = accepted(row["accepted"], width, len(prefixes)) if "accepted" in row else ()
    if "new_tokens" in row:
        new = new_tokens(row["new_tokens"], len(prefixes), row["page_size"], claims.max_extend_tokens)
        width = room_for(new)
    head_dim = row["head_dim"]
    if mla and "mla" in claims.families and claims.families != {"mla"}:
        head_dim = max(head_dim, min(claims.head_dims))
    window = row["window"]
    if tree is not None and tree.topk > 1 and not claims.window_in_trees:
        window = -1
    return Case(
        mode=mode,
        heads=heads,
        head_dim=head_dim,
        rope_dim=row["rope_dim"] if mla else 0,
        dtype=row["dtype"],
        kv_dtype=row["kv_dtype"],
        page_size=row["page_size"],
        prefixes=prefixes,
        new=new,
        width=width,
        tree=tree,
        draft=draft,
        chunks=row.get("chunks", 1),
        layout=row["layout"],
        data=row["data"],
        window=window,
        logit_cap=row["logit_cap"],
        sinks=row["sinks"],
        bucket=len(prefixes) + row["slack"],
        padding=row["padding"] if row["slack"] else "prod",
    )


@cached(LRUCache(64), condition=threading.Condition())
def generate(claims: Capabilities, mode: ForwardMode, tier: str, seed: int = 0) -> tuple[Case, ...]:
    """The cases of a tier for one mode of a backend with these claims, always in the same order.

    ``tier``: a name of ``TIERS``, else ``KeyError``. Empty where nothing that is claimed can be tried. ``seed``: other
    data, slots and choices for the same cases.
    """
    dimensions = _dimensions(claims, mode, tier)
    names = list(dimensions)
    if any(not values for values in (*dimensions.values(), claims.kv_layouts)):
        return ()
    strength = min(TIERS[tier], len(names))
    rows = _rows(tuple(len(dimensions[name]) for name in names), strength, mode.value)
    cases: dict[str, Case] = {}
    for row in rows:
        built = _build(claims, mode, {name: dimensions[name][i] for name, i in zip(names, row, strict=True)})
        # The seed decides lengths, too: seeded before it is asked whether it fits.
        case = as_claimed(claims, replace(built, seed=seed, kv_layout=usual_layout(claims)))
        if within_claims(claims, case):
            cases.setdefault(case.id, case)
    if cases:
        for named in named_cases(claims, mode, tier, named_from(mode, list(cases.values()))):
            case = as_claimed(claims, named.with_seed(seed))
            if within_claims(claims, case):
                cases.setdefault(case.id, case)
    base = smallest_of(claims, without_options_of(claims, named_from(mode, list(cases.values())))) if cases else None
    if cases and tier != "smoke":
        found = list(cases.values())
        small = small_cases(claims, mode, tier, found, lambda case: within_claims(claims, as_claimed(claims, case)))
        cases.update((case.id, case) for case in (as_claimed(claims, each) for each in small))
    for each in _later(claims, mode, base, tier) if base else ():
        case = as_claimed(claims, each.with_seed(seed))
        if within_claims(claims, case):
            cases.setdefault(case.id, case)
    return tuple(cases.values())


def _later(claims: Capabilities, mode: ForwardMode, base: Case, tier: str) -> Iterator[Case]:
    """What stands behind all others: made of ``base``, which has little work for each row and key."""
    if tier != "smoke":
        yield from way_cases(claims, base)
        yield from varied(claims, list(part_cases(claims, base)))
        yield from extreme_cases(claims, base)
        yield from varied(claims, list(layer_cases(claims, base)))
        yield from one_head_cases(claims, base)
        yield from row_edge_cases(claims, tier, base)
        yield from three_kv_heads_cases(claims, base)
        yield from large_cases(claims, tier, base)
        yield from page_count_cases(claims, base)
        yield from company_cases(claims, base)
        yield from claimed_pair_cases(claims, base)
        yield from shared_prefix_cases(claims, base)
        arrays = list(enriched(claims, list(pair_array_cases(claims, base))))
        arrays += enriched(claims, list(layout_array_cases(claims, plain_case(claims, mode))))
        yield from arrays
        yield from varied(claims, list(options_together_cases(claims, base, arrays)), batches=True)
        yield from uniform_batch_cases(claims, base)
    yield from code_cases(claims, tier, base)
    yield from switch_cases(claims, base)
    yield from pool_layout_cases(claims, mode, tier, plain_case(claims, mode))
    if tier == "full":
        yield from big_pool_cases(claims, base)


@cached(LRUCache(256), condition=threading.Condition())
def _rows(sizes: tuple[int, ...], strength: int, salt: str) -> list[list[int]]:
    """A covering array over dimensions of so many values, as indices. Many backends differ in nothing else."""
    return covering_array(sizes, strength, salt) if strength > 1 else _once(sizes)


def _once(sizes: Sequence[int]) -> list[list[int]]:
    """Every value once: as many rows as the longest dimension has values."""
    return [[(row + shift) % size for shift, size in enumerate(sizes)] for row in range(max(sizes))]
