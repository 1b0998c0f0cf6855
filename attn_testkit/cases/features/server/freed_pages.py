"""Entries of a request table for pages that every row of a windowed KV group has passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ....contract import Capabilities
from ...fields import C, Changes, Fields
from ...layers import PERIOD, Layers
from .variant import ServerVariant

_WINDOW = 7
_LENS = (3, 70, 6)
"""Prefixes: the second request has freed pages, and the others have not, unless pages are small."""


def _fits(entry: str) -> Callable[[Capabilities, Fields], bool]:
    def fits(declared: Capabilities, case: Fields) -> bool:
        return entry in declared.server.freed_pages

    return fits


def _needs(declared: Capabilities, so_far: Changes) -> Changes:
    layers = so_far.get("layers", Layers())
    window = so_far.get("window", -1)
    return {
        "layers": replace(layers, groups=True, count=max(layers.count, PERIOD)),
        "window": window if window >= 0 else max(_WINDOW, declared.windows.smallest),
    }


def _cases(word: str, entry: str) -> Callable[[Capabilities, C], Iterator[C]]:
    def cases(declared: Capabilities, small: C) -> Iterator[C]:
        windowed = small.mode in declared.windows.modes and not small.mode.is_draft_decode()
        if entry in declared.server.freed_pages and declared.kv_pool.kv_groups and windowed:
            page = min((size for size in declared.kv_pool.page_sizes if size > 1), default=1)
            needed = {**_needs(declared, vars(small)), "layer_windows": declared.windows.layers}
            small = small.with_changes(page_size=page, data="gauss", variants=frozenset({word}), **needed)
            yield small.of_requests(_LENS, padded=1)

    return cases


def _variant(word: str, entry: str, about: str, order: int, also: tuple[str, ...]) -> ServerVariant:
    return ServerVariant(
        word,
        f"the request table of a windowed KV group has {about} for keys in pages that it has freed",
        "server.freed_pages",
        _cases(word, entry),
        _fits(entry),
        says={"freed_pages": entry},
        needs=_needs,
        excludes={
            "one KV group": "a table that other layers use lists all pages",
            "no window": "only layers with a window pass pages",
            **({"freed_null_page": "a table has one kind of entry"} if entry == "minus_one" else {}),
        },
        order=order,
        also=also,
    )


FREED_MINUS_ONE = _variant("freed_minus_one", "minus_one", "-1", 180, ("freed pages", "tombstone"))
FREED_NULL_PAGE = _variant("freed_null_page", "null_page", "slots of page 0", 190, ("null block",))
