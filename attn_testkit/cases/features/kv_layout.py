"""Layout of the KV pool in memory: the order of its axes."""

from __future__ import annotations

from dataclasses import replace

from ...contract import KV_LAYOUTS, BackendContext, Capabilities
from ...contract.kv_layouts import OWN
from ...glossary import Entry
from ..fields import Changes, Fields
from ..head_layouts import declared_layouts
from .feature import Asked, Columns, Covered, Feature, Trait, Without, Word, of_fields
from .outside import pool_like
from .page_size import lens_beyond_a_page
from .rows import keys_of


def usual_layout(declared: Capabilities) -> str:
    """The layout of most cases: the first declared one."""
    return next(name for name in KV_LAYOUTS if name in declared.kv_pool.kv_layouts)


def _word(name: str) -> str:
    return "kv" + name.removeprefix("kv").replace("-", "")


_NAMES = {_word(name): name for name in KV_LAYOUTS if name != "nhd"}


def _tried(declared: Capabilities, case: Fields) -> str | None:
    one_head = case.heads.kv_heads == 1 and any(layout.kv_heads != "one" for layout in declared_layouts(declared))
    one_slot = case.page_size == 1 and declared.kv_pool.page_sizes != {1}
    # Of one KV head, in pages of one slot, or in one page, layouts are alike.
    alike = one_head or one_slot or max(keys_of(case)) <= case.page_size
    return None if alike and case.kv_layout != "nhd" else case.kv_layout


def _in_pages(declared: Capabilities, case: Fields, layout: str) -> Changes:
    """Pages of several slots, and requests of several pages."""
    page = next((page for page in sorted(declared.kv_pool.page_sizes) if page > 2), max(declared.kv_pool.page_sizes))
    return {"kv_layout": layout, "page_size": page, "prefixes": lens_beyond_a_page(page)}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    name = next((name for name in KV_LAYOUTS if name not in declared.kv_pool.kv_layouts and name != OWN), None)
    pool = name and pool_like(context, layout=name)
    return (f"KV layout {name}", replace(context, kv_pool=pool)) if pool else None


KV_LAYOUT = Feature(
    name="KV layout",
    order=150,
    fields=("kv_layout",),
    traits=(Trait("K and V in one allocation", lambda case: case.kv_layout not in ("nhd", OWN)),),
    words=(
        Word(
            "|".join(_NAMES),
            lambda match, so_far: {"kv_layout": _NAMES[match[0]]},
            lambda case: "" if case.kv_layout == "nhd" else _word(case.kv_layout),
            spelled=tuple(_NAMES),
        ),
    ),
    explained=(
        Entry(
            "KV layout",
            "The order of K and V in the memory of the pool. `nhd` is the default, and case ids do not write it.",
            also=("axis order", "kv_layout"),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "nhd",
            "KV layout [2, pages, page_size, heads, D], as SGLang has it: the default.",
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvhnd",
            "KV layout [2, pages, heads, page_size, D]: heads before the slots of a page.",
            also=("hnd",),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvinblock",
            "KV layout [pages, 2, page_size, heads, D]: K and V of a page follow each other.",
            also=("kv-in-block",),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvsidebyside",
            "KV layout [pages, page_size, heads, 2, D]: K and V of a slot and head follow each other.",
            also=("side-by-side",),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvsidebysidehnd",
            "KV layout [pages, heads, page_size, 2, D]: K and V of a head and slot follow each other.",
            also=("side-by-side-hnd",),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvlayersinblock",
            "KV layout in which one block holds a page of all layers, so that a layer's pages are strided.",
            also=("layers-in-block",),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvpaddedpages",
            "KV layout with pages padded to the size that other layers have, as in hybrid models.",
            also=("padded-pages",),
            page="how-to/kv-layouts.md",
        ),
        Entry(
            "kvcustom",
            "A KV pool that the backend allocates and describes by views.",
            also=("kvown", "custom layout", "own layout"),
            page="how-to/kv-layouts.md",
        ),
    ),
    describe=lambda case: {"kv_layout": "" if case.kv_layout == "nhd" else case.kv_layout},
    declared=(
        Asked(
            lambda case: f"KV layout {case.kv_layout}",
            lambda declared, case: case.kv_layout in declared.kv_pool.kv_layouts,
        ),
    ),
    fit=lambda declared, case: (
        {} if case.kv_layout in declared.kv_pool.kv_layouts else {"kv_layout": usual_layout(declared)}
    ),
    values=Columns(
        lambda declared, mode, tier: (
            {"kv_layout": [name for name in KV_LAYOUTS if name in declared.kv_pool.kv_layouts]}
        ),
        further=("kv_layout",),
    ),
    covered=(
        Covered(
            "kv_layout",
            "KV layout",
            lambda declared, mode: declared.kv_pool.kv_layouts,
            _tried,
            _in_pages,
        ),
    ),
    simpler=of_fields("kv_layout"),
    undeclared=(_undeclared,),
    random=lambda draws, declared, so_far: {
        "kv_layout": draws.one_of([name for name in KV_LAYOUTS if name in declared.kv_pool.kv_layouts])
    },
    varies="instance",
    apply=Without("The contract's pool defines the axes, and the harness makes a pool of this layout."),
)
