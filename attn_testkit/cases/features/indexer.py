"""The indexer: the backend stores index keys and selects the keys of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...contract import BackendContext, Capabilities, ForwardMode, Indexer
from ...glossary import Entry
from ..fields import Changes, Fields
from ..indexing import INDEX_DATA, PATTERN, Indexing
from ..layers import PERIOD
from .feature import (
    Asked,
    Bound,
    Columns,
    Covered,
    Draws,
    Feature,
    OnLayers,
    Row,
    Trait,
    Without,
    Word,
    of_fields,
    option,
)
from .kv_splits import has_own_pools
from .outside import with_layers
from .selection import SELECTION

_FEW_HEADS = 8
"""Index heads of most cases, if this number is declared: an index head costs as much as a head of attention."""


def _of(declared: Capabilities, mode: ForwardMode) -> Indexer | None:
    """The indexer that is declared in a mode; None in a draft-decode that attends to keys selected before it."""
    indexer = declared.sparse.indexer if declared.sparse else None
    return None if indexer and mode is ForwardMode.DRAFT_DECODE and not indexer.drafts else indexer


def _words(case: Fields) -> str:
    each = case.indexer
    if each is None:
        return "selections without an indexer"
    scale = "powers of two" if each.pow2 else "amax / 448"
    more = (
        ", in forward" * each.fused
        + f", which rotates its queries and keys in the style {each.rotates}" * (each.rotates != "none")
        + f", of whose selections each is for {each.reuse} layers" * each.shared
        + " in the first forward of a draft" * each.first
        + f", {each.data}" * bool(each.data)
    )
    return f"an indexer{' on each rank' * has_own_pools(case)} of {each.heads} heads with scales {scale}{more}"


def _declared(declared: Capabilities, case: Fields) -> bool:
    indexer, each = _of(declared, case.mode), case.indexer
    if indexer is None:
        return each is None
    if each is None:
        return not indexer.fused
    return (
        each.heads in indexer.heads
        and each.pow2 == (indexer.scale == "power_of_two")
        and each.fused == indexer.fused
        and each.rotates == indexer.rotates
        and each.shared <= indexer.reuses_selections
        and has_own_pools(case) <= indexer.replicated
        and (("first" if each.first else "each") in indexer.drafts if case.draft else not each.first)
        and (each.is_exact or not indexer.fused)
    )


def _fit(declared: Capabilities, case: Fields) -> Changes:
    indexer, each = _of(declared, case.mode), case.indexer
    if _declared(declared, case):
        return {}
    if indexer is None or has_own_pools(case) > indexer.replicated:
        return {"indexer": None}
    return {"indexer": _like(indexer, each or Indexing(0), case.mode)}


def _like(indexer: Indexer, each: Indexing, mode: ForwardMode) -> Indexing:
    """The declared indexer that is most similar to ``each``."""
    heads = each.heads if each.heads in indexer.heads else _usual_heads(indexer)
    reuse = each.reuse if indexer.reuses_selections else 1
    drafts = indexer.drafts if mode is ForwardMode.DRAFT_DECODE else ()
    first = "first" in drafts and (each.first or "each" not in drafts)
    data = "" if indexer.fused or first else each.data
    return Indexing(heads, indexer.scale == "power_of_two", indexer.fused, reuse, first, data, indexer.rotates)


def _usual_heads(indexer: Indexer) -> int:
    return max((heads for heads in indexer.heads if heads <= _FEW_HEADS), default=min(indexer.heads))


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> dict[str, Sequence[Any]]:
    indexer = _of(declared, mode)
    if indexer is None:
        return {}
    data = ("",) if indexer.fused else INDEX_DATA
    kinds = [_like(indexer, Indexing(0, data=each), mode) for each in data]
    if indexer.reuses_selections:
        kinds.insert(1, replace(kinds[0], reuse=PERIOD))
    if mode is ForwardMode.DRAFT_DECODE and "first" in indexer.drafts:
        kinds.insert(1, replace(kinds[0], first=True))
    kinds = list(dict.fromkeys(kinds))
    # Half of the cases have selections of the kit, whose patterns and -1 no indexer gives.
    return {"indexer": kinds if indexer.fused else [None, *kinds, *[None] * (len(kinds) - 1)]}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    indexer = row.get("indexer")
    if indexer is None:
        return {"indexer": None} if "indexer" in row else {}
    return {"indexer": indexer, "selection": replace(so_far["selection"], holes=False, empty_rows=False)}


def _simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    each = case.indexer
    if each is not None:
        for reuse in (1, PERIOD):
            if each.reuse > reuse:
                yield {"indexer": replace(each, reuse=reuse)}
        if each.data:
            yield {"indexer": replace(each, data="")}
        if each.first:
            yield {"indexer": replace(each, first=False)}


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    indexer = declared.sparse.indexer if declared.sparse else None
    if indexer is None:
        return "an indexer", with_layers(context, index_heads=64)
    other = next(heads for heads in (64, 32, 24) if heads not in indexer.heads)
    return f"an indexer of {other} heads", with_layers(context, index_heads=other)


def _random(draws: Draws, declared: Capabilities, so_far: Changes) -> Changes:
    columns = _columns(declared, so_far["rows"].mode, "")
    return _of_row(declared, {name: draws.one_of(values) for name, values in columns.items()}, so_far)


def _of_layers(case: Fields) -> Sequence[Changes]:
    each = case.indexer
    if each is None:
        return [{}] * case.layers.count
    own = {"index_heads": each.heads}
    return [own if each.source(i) == i else {**own, "reuses_selection": True} for i in range(case.layers.count)]


def _tried(declared: Capabilities, case: Fields) -> int | None:
    """The index heads of a case in which some row leaves keys out."""
    if case.indexer is None or case.selection is None or max(case.prefixes) < 2 * case.selection.topk:
        return None
    return case.indexer.heads


def _make(declared: Capabilities, case: Fields, value: Any) -> Changes:
    indexer = _of(declared, case.mode)
    assert indexer is not None
    assert not isinstance(SELECTION.fit, Without)
    selection = case.selection or SELECTION.fit(declared, case)["selection"]
    topk = selection.topk
    keys = tuple(4 * topk + 3 * place + each for place, each in enumerate(case.prefixes))
    return {"indexer": _like(indexer, Indexing(value), case.mode), "selection": selection, "prefixes": keys}


def _wrong(case: Fields) -> str:
    each = case.indexer
    if each and not case.selection:
        return f"{each} selects keys, but layers attend to all keys: add a word such as sel16"
    if each and each.shared and not each.is_exact:
        return f"{each} has several right selections, so layers cannot share one: leave out reuse or {each.data}"
    if each and each.first and not each.is_exact:
        return f"{each} has several right selections, so forwards cannot share one: leave out first or {each.data}"
    return ""


INDEXER = Feature(
    name="indexer",
    order=260,
    fields=("indexer",),
    option=True,
    traits=(
        Trait(
            "indexer",
            lambda case: case.indexer is not None,
            excludes={"branches of a draft": "servers with an indexer draft chains"},
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            PATTERN,
            lambda match, so_far: {"indexer": Indexing.read(match)},
            lambda case: str(case.indexer or ""),
            bounds=(Bound("number of index heads", 1, 256),),
        ),
    ),
    explained=(
        Entry(
            "indexer",
            "The part of sparse attention that selects keys: it scores index keys, which are small and have "
            "their own pool.",
            also=("index keys", "lightning indexer"),
            page="how-to/selected-keys.md",
        ),
        Entry(
            "index pool",
            "The cache of index keys: FP8 keys with a scale per token, in pages of 64 keys and then 64 scales.",
            page="how-to/selected-keys.md",
        ),
        Entry(
            "idx4",
            "The backend stores index keys and selects, with an indexer of 4 heads. Each row has one best selection.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4pow2",
            "An indexer of 4 heads whose keys have scales that are powers of two.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4neox",
            "An indexer of 4 heads that rotates its queries and keys, with numbers i and i + 32 as a pair.",
            also=("fused RoPE and quantization",),
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4interleaved",
            "An indexer of 4 heads that rotates its queries and keys, with numbers 2 i and 2 i + 1 as a pair.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry("idx4fused", "An indexer of 4 heads inside `forward`.", page="how-to/selected-keys.md", numbers=True),
        Entry(
            "idx4reuse",
            "An indexer of 4 heads, and every second layer attends to the keys that the layer before it selected.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4reuse4",
            "An indexer of 4 heads, whose selections are each for 4 layers: the one that selects, and the 3 after it.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4first",
            "draft-decode: an indexer of 4 heads that selects in the first forward. Later forwards attend to the keys "
            "that it selected.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4ties",
            "An indexer of 4 heads whose keys have equal scores, except for a few, so several selections are right.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4near",
            "An indexer of 4 heads whose scores are all within a few percent of each other.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
        Entry(
            "idx4gauss",
            "An indexer of 4 heads whose scores round, so keys within a computed margin may be exchanged.",
            page="how-to/selected-keys.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"indexer": _words(case) if case.indexer else ""},
    declared=(Asked(_words, _declared),),
    fit=_fit,
    values=Columns(_columns, _of_row),
    covered=(
        Covered(
            "index heads",
            "index heads",
            lambda declared, mode: indexer.heads if (indexer := _of(declared, mode)) else (),
            _tried,
            _make,
        ),
        option(
            "layers that use another layer's selection",
            lambda declared, mode: bool((indexer := _of(declared, mode)) and indexer.reuses_selections),
            lambda case: case.indexer is not None and case.indexer.shared and case.layers.count > 1,
        ),
        option(
            "forwards of a draft that use the selection of the first",
            lambda declared, mode: bool(
                mode is ForwardMode.DRAFT_DECODE and (indexer := _of(declared, mode)) and "first" in indexer.drafts
            ),
            lambda case: (
                case.indexer is not None and case.indexer.first and case.draft is not None and case.draft.forwards > 1
            ),
        ),
    ),
    simpler=of_fields("indexer", steps=_simpler),
    undeclared=(_undeclared,),
    random=_random,
    varies="instance",
    apply=(OnLayers(_of_layers),),
)
