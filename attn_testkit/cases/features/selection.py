"""Selected keys of sparse attention: how many keys a row attends to, and in which form the backend gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, Sparse
from ...glossary import Entry
from ..fields import Changes, Fields
from ..selection import PATTERN, Selection
from .feature import Asked, Bound, Columns, Covered, Draws, Feature, OnLayers, Row, Trait, Word, of_fields, option
from .outside import with_layers

_LONGER = 5
"""About number of keys for each selected key in a case that tries a top-k. With fewer keys all are selected, and a
backend that ignores the selection passes."""
_FLAGS = {"holes": 2, "empty_rows": 3, "without_own_block": 4}
"""Flags of a selection that a backend may declare -> one of how many cases has it, if a case says nothing else."""
_WIDE, _MORE = 512, 64
"""Smallest top-k for which one request has only a few keys more than its rows select, and how many: 2,112 for 2,048."""


def _words(case: Fields) -> str:
    each = case.selection
    if each is None:
        return "layers that attend to all keys"
    more = [" -1 before a key"] * each.holes + [" a row of each layer without a key"] * each.empty_rows
    more += [" rows without the block that contains them"] * each.without_own_block
    what = f"block{'s'[: each.topk - 1]} of {each.block} keys" if each.block > 1 else f"key{'s'[: each.topk - 1]}"
    per = "KV head of a row" if each.per_kv_head else "row"
    where = "" if each.block > 1 and each.space == "positions" else f", as {each.space}"
    return f"up to {each.topk} selected {what} per {per}{where}{' with' * bool(more)}{' and'.join(more)}"


def _declared(declared: Capabilities, case: Fields) -> bool:
    sparse, each = declared.sparse, case.selection
    if sparse is None or each is None:
        return sparse is None and each is None
    flags = {name: getattr(each, name) and getattr(sparse, name) for name in _FLAGS}
    return each.topk in sparse.topk and each == Selection.of(sparse, each.topk, **flags)


def _fit(declared: Capabilities, case: Fields) -> Changes:
    sparse, each = declared.sparse, case.selection
    if _declared(declared, case):
        return {}
    if sparse is None:
        return {"selection": None}
    sizes = sorted(sparse.topk)
    # Cases that are made for dense layers take each width in turn, and each way to write it.
    turn = sum(case.prefixes) + case.bs if each is None else 0
    topk = each.topk if each and each.topk in sizes else _of_keys(sparse, sizes[turn % len(sizes)], case.prefixes)
    flags = {
        name: getattr(sparse, name) and (getattr(each, name) if each else turn % count == 1)
        for name, count in _FLAGS.items()
    }
    return {"selection": Selection.of(sparse, topk, **flags)}


def _of_keys(sparse: Sparse, topk: int, prefixes: Sequence[int]) -> int:
    """The largest width up to ``topk`` that leaves keys out; the smallest width if none leaves any out."""
    most = max(prefixes)
    return max((size for size in sparse.topk if size <= topk and size * sparse.block < most), default=min(sparse.topk))


def _columns(declared: Capabilities, mode: object, tier: str) -> dict[str, Sequence[Any]]:
    sparse = declared.sparse
    if sparse is None:
        return {}
    flags = {name: [False, True] for name in _FLAGS if getattr(sparse, name)}
    return {"selected": sorted(sparse.topk), **flags}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    if declared.sparse is None:
        return {}
    topk = _of_keys(declared.sparse, row["selected"], so_far.get("prefixes", (0,)))
    return {"selection": Selection.of(declared.sparse, topk, **{name: row.get(name, False) for name in _FLAGS})}


def _tried(declared: Capabilities, case: Fields) -> int | None:
    """The top-k of a case in which some row has more keys than it selects."""
    if case.selection is None:
        return None
    keys = case.selection.keys
    return case.selection.topk if max(case.prefixes) >= (keys + _MORE if keys >= _WIDE else 2 * keys) else None


def _make(declared: Capabilities, case: Fields, value: Any) -> Changes:
    selection = case.selection or _fit(declared, case)["selection"]
    wide = value * selection.block
    if wide >= _WIDE:
        keys = (wide + _MORE, *case.prefixes[1:])
    else:
        keys = tuple(wide * _LONGER + 3 * place + each for place, each in enumerate(case.prefixes))
    return {"selection": replace(selection, topk=value), "prefixes": keys}


def _simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    each = case.selection
    if each is not None:
        for name in _FLAGS:
            if getattr(each, name):
                off: Changes = {name: False}
                yield {"selection": replace(each, **off)}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.sparse is None:
        return "selected keys", with_layers(context, topk=16)
    other = next(topk for topk in (16, 64, 24) if topk not in declared.sparse.topk)
    return f"{other} selected keys", with_layers(context, topk=other)


def _undeclared_form(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if declared.sparse is None:
        return None
    other = not declared.sparse.per_kv_head
    text = "a selection of each KV head" if other else "one selection for all KV heads"
    return text, with_layers(context, selects_per_kv_head=other)


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    columns = _columns(declared, None, "")
    return _of_row(declared, {name: draws.one_of(values) for name, values in columns.items()}, so_far)


def _of_layers(case: Fields) -> Sequence[Changes]:
    each = case.selection
    changes = {"topk": each.topk, "selects_per_kv_head": each.per_kv_head} if each else {}
    return [changes] * case.layers.count


def _flag(text: str, name: str) -> Covered:
    return option(
        text,
        lambda declared, mode: declared.sparse is not None and getattr(declared.sparse, name),
        lambda case: case.selection is not None and getattr(case.selection, name),
    )


SELECTION = Feature(
    name="selection",
    order=250,
    fields=("selection",),
    option=True,
    traits=(
        Trait(
            "selected keys",
            lambda case: case.selection is not None,
            excludes={
                "KV splits of one pool": "a selection is made among all keys of a request",
                "KV groups": "an index is a position in one request table",
                "loop": "the model of a loop has no indexer",
                "branching trees": "servers with an indexer verify chains",
            },
        ),
        Trait(
            "selected slots",
            lambda case: case.selection is not None and case.selection.space != "positions",
            excludes={"ranks with their own pools": "a slot is of the pool of one rank, and all get one selection"},
        ),
        Trait(
            "selected pages",
            lambda case: case.selection is not None and case.selection.space == "pages",
            excludes={
                "blocks of another size than pages": "an index is a page of the KV pool",
                "branches of a draft": "each branch has a copy of the page in which the prefix ends",
            },
        ),
        Trait(
            "blocks of another size than pages",
            lambda case: case.selection is not None and case.selection.block != case.page_size,
        ),
        Trait(
            "selections of each KV head",
            lambda case: case.selection is not None and case.selection.per_kv_head,
            excludes={
                "ranks with their own pools": "a rank finds its keys in one selection for all heads",
                "heads by layer": "a row of `selected` has the same shape in all layers",
                "indexer": "the kit's indexer makes one selection for a row",
            },
        ),
    ),
    words=(
        Word(
            PATTERN,
            lambda match, so_far: {"selection": Selection.read(match)},
            lambda case: str(case.selection or ""),
            bounds=(Bound("number of selected keys", 1, 65_536),),
        ),
    ),
    explained=(
        Entry(
            "selected keys",
            "The keys that an indexer chose for a row, a list of indices per row and layer. The row attends "
            "to only these.",
            also=("selected", "selection", "sparse attention"),
            page="how-to/selected-keys.md",
        ),
        Entry(
            "sel16",
            "Each row selects up to 16 keys, given as positions in its request.",
            also=("sparse top-k",),
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel4of16",
            "Each row selects up to 4 blocks of 16 keys. The block of the row's key is one of them.",
            also=("block selection",),
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel4of16pages",
            "Each row selects up to 4 pages of 16 keys, given as pages of the KV pool.",
            also=("selected pages",),
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel4of16perhead",
            "Each KV head of a row selects up to 4 blocks of 16 keys for itself.",
            also=("per_kv_head", "selection per KV head"),
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel4of16withoutown",
            "Each row selects up to 4 blocks of 16 keys, and some rows do not list the block that contains them.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel16slots",
            "Each row selects up to 16 keys, given as slots of the KV pool.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel16holes",
            "Each row selects up to 16 keys, and -1 may come before a key.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "sel16empty",
            "Each row selects up to 16 keys, and in each layer one row selects none.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "index space",
            "What an index of a selection is: the position of a key in its request, or a slot or page of the KV pool.",
            page="how-to/selected-keys.md",
        ),
        Entry(
            "holes",
            "Entries of -1 that come before a key in a row's selection. A kernel must skip them and read on.",
            page="how-to/selected-keys.md",
        ),
        Entry(
            "empty rows",
            "Rows of a live request that select no key. Their output may be any finite number.",
            also=("empty row",),
            page="how-to/selected-keys.md",
        ),
    ),
    describe=lambda case: {"selection": _words(case) if case.selection else ""},
    declared=(Asked(_words, _declared),),
    fit=_fit,
    values=Columns(_columns, _of_row),
    covered=(
        Covered(
            "selection",
            "selected keys",
            lambda declared, mode: declared.sparse.topk if declared.sparse else (),
            _tried,
            _make,
        ),
        _flag("-1 before selected keys", "holes"),
        _flag("rows without a key", "empty_rows"),
        _flag("rows without their own block", "without_own_block"),
    ),
    simpler=of_fields("selection", steps=_simpler),
    undeclared=(_undeclared, _undeclared_form),
    random=_random,
    varies="instance",
    apply=(OnLayers(_of_layers),),
)
