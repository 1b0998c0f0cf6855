"""Cases with more in them: another batch, other rows, KV splits, server variants, layers that differ, padding.

A program chooses a path by any of these, and a bug may need two at once. Named cases are made for one thing each, with
usual values of everything else. Here each case of an array takes what none before it has together, and those that are
made for two things, such as a server variant and options of a layer, take other slots, data and padding. None of it
adds a case.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, cycle, islice
from typing import Any

from ..contract import Capabilities, ForwardMode
from .case import Case
from .declared import within_declared
from .dimensions.padding import PADDINGS
from .dimensions.rows import accepted, most_rows
from .dimensions.slot_order import LAYOUTS
from .draft import Draft
from .layers import PERIOD, Layers
from .rows import Accepted, Drafted, Extend, Rows, Verify, room_for
from .server_variants import SERVER_VARIANTS, ServerVariant, all_fit
from .trees import Tree, chain

__all__ = ["randomly_combined", "randomly_varied"]

_DRAWS = 60
"""Draws for each case. Twice as many cover hardly more."""
_FEWEST = 12
_PARTS = {"whole": ("whole",), "prefix": ("prefix",), "pages": ("pages2", "pages3"), "tokens": ("tokens3", "tokens2")}
_DATA = ("gauss", "shifted", "peaked", "one_hot")
"""Each shows a wrong key, position or head."""
_SLACK = (0, 1, 3)
_TREES = (chain(2), Tree((0, 0, 1, 2)), chain(7), Tree((0, 0, 0)), chain(17))
_DRAFTS = (Draft(1, 4), Draft(2, 3), Draft(4, 2), Draft(1, 7))
_WIDTHS, _ACCEPTED = (2, 4, 6), ("uneven", "one", "all")
_NEW = {"ones": (1,), "equal": (17,), "prompt first": (70, 1), "decodes first": (1, 2, 70), "ragged": (9, 20, 2)}
"""New tokens of the first requests; the last one again for all behind them, and none for those that are not there."""

_NONE = None
_SELDOM, _MOST_VARIANTS = 4, 2
"""One of five draws has a given server variant, KV splits, or layers that differ, and none has more than two variants:
what needs a third is rare, and each of them excludes batches and rows of others."""

_WEIGHT_OF_VARIANTS = 20

_Feature = tuple[str, Any]


def randomly_combined(declared: Capabilities, cases: Sequence[Case]) -> Iterator[Case]:
    """Each of ``cases``, which are of one mode, with the settings that cover most pairs that no case before it has.

    Their heads, head dims, dtypes, page sizes, pool layouts and options stay.
    """
    met: set[tuple[_Feature, _Feature]] = set()
    layouts: set[str] = set()
    # A short array, of few capabilities, has cases again: they take something else then.
    count = max(_FEWEST, len(cases)) if cases else 0
    for number, case in enumerate(islice(cycle(cases), count)):
        own, more = _features(case), _dimensions(declared, case)
        if case.kv_layout not in layouts:
            # Of keys that are in one page all layouts are alike.
            more["batch"].remove("fresh")
            layouts.add(case.kv_layout)
        yield _meeting_most(declared, case, own, more, met, f"{case.mode} {number}")


def randomly_varied(declared: Capabilities, cases: Sequence[Case], *, batches: bool = False) -> Iterator[Case]:
    """Each of ``cases``, which are of one mode; those with options of a layer have other slots, data and padding than
    the ones before them. ``batches``: other requests and rows, too.
    """
    met: set[tuple[_Feature, _Feature]] = set()
    for case in cases:
        if case.window < 0 and not case.sinks and case.logit_cap == 0:
            yield case
            continue
        own: list[_Feature] = [
            ("kind", (case.variants, case.parts, case.own_merge, case.layers)),
            ("kv_dtype", case.kv_dtype),
            *((word, word) for word in SERVER_VARIANTS if word in case.variants),
        ]
        of_kind = _dimensions(declared, case)
        more = {name: of_kind[name] for name in ("layout", "slack", "padding")}
        # Other data than the usual were chosen for what they show.
        more["data"] = of_kind["data"] if case.data == "gauss" else [case.data]
        if batches:
            others = [word for word in SERVER_VARIANTS if word in of_kind and word not in case.variants]
            more |= {name: of_kind[name] for name in ("batch", *others)}
            if case.new and "rows" in of_kind:
                more["rows"] = of_kind["rows"]
        yield _meeting_most(declared, case, own, more, met, f"{case.id} varied")


def _meeting_most(
    declared: Capabilities,
    case: Case,
    own: Sequence[_Feature],
    more: Mapping[str, Sequence[Any]],
    met: set[tuple[_Feature, _Feature]],
    salt: str,
) -> Case:
    """``case`` with that of some draws of ``more`` which meets most that is not in ``met``, where it is met then; as it
    is where none is declared. ``own``: what it has anyway.
    """
    draws = random.Random(salt)
    drawn = _with_pairs([_drawn(draws, more) for _ in range(_DRAWS)], more, met)
    drawn.sort(key=lambda each: sum(map(_weight, _pairs(own, each) - met)), reverse=True)
    for each in drawn:
        if changed := _changed(declared, case, each):
            met |= _pairs(own, each)
            return changed
    return case


def _drawn(draws: random.Random, more: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    found = ((name, draws.choice(values)) for name, values in more.items() if values)
    return {name: value for name, value in found if value is not _NONE}


def _with_pairs(
    drawn: list[dict[str, Any]], more: Mapping[str, Sequence[Any]], met: set[tuple[_Feature, _Feature]]
) -> list[dict[str, Any]]:
    """Every second one with two server variants that no case has together: two that fit are seldom drawn."""
    words = [word for word in SERVER_VARIANTS if word in more]
    lacking = [pair for pair in combinations(words, 2) if tuple(zip(pair, pair, strict=True)) not in met]
    for number in range(1, len(drawn) if lacking else 0, 2):
        pair, others = lacking[number // 2 % len(lacking)], drawn[number]
        taken = {
            **{name: value for name, value in others.items() if name not in SERVER_VARIANTS},
            **{word: word for word in pair},
        }
        drawn[number] = {name: taken[name] for name in more if name in taken}
    return drawn


def _features(case: Case) -> list[_Feature]:
    names = ("heads", "head_dim", "dtype", "kv_dtype", "page_size", "kv_layout", "window", "logit_cap", "sinks")
    return [(name, getattr(case, name)) for name in names]


def _weight(pair: tuple[_Feature, _Feature]) -> int:
    """Two server variants are met in few cases, and most of those that are drawn are refused."""
    return _WEIGHT_OF_VARIANTS if pair[0][0] in SERVER_VARIANTS and pair[1][0] in SERVER_VARIANTS else 1


def _pairs(own: Sequence[_Feature], drawn: Mapping[str, Any]) -> set[tuple[_Feature, _Feature]]:
    new = list(drawn.items())
    return {(old, each) for old in own for each in new} | set(combinations(new, 2))


def _dimensions(declared: Capabilities, case: Case) -> dict[str, list[Any]]:
    """Name -> values of which a case has one."""
    found: dict[str, list[Any]] = {
        "batch": list(_batches(case)),
        "layout": list(LAYOUTS),
        "data": list(_DATA),
        "slack": list(_SLACK),
        "padding": list(PADDINGS),
    }
    layers = [Layers(PERIOD, 5)] + [Layers(PERIOD, groups=True)] * (declared.kv_groups and not case.draft)
    for name, values in (("layers", layers), ("parts", _parts(declared, case))):
        found[name] = [_NONE] * _SELDOM * len(values) + values
    for word, variant in SERVER_VARIANTS.items():
        if variant.combines and _may_fit(declared, case, variant):
            found[word] = [*[_NONE] * _SELDOM, word]
    if case.mode is ForwardMode.EXTEND:
        found["chunks"] = [1, 3]
    rows = [each for each in _rows(declared, case.mode) if _width(each) <= most_rows(declared, case.mode)]
    return {**found, "rows": rows} if rows else found


def _batches(case: Case) -> dict[str, tuple[int, ...]]:
    """Prefixes. Page by page of the case, so that each has some pages, and part of one."""
    page, longest = case.page_size, max(case.prefixes)
    whole = 4 * page - case.width
    return {
        "own": case.prefixes,
        "alone": (longest,),
        "alike": (2 * page + 1,) * 3,
        "whole pages": tuple(max(0, whole - page * fewer) for fewer in (0, 2, 3)),
        "fresh": (0,) * 3,
        "many": (2 * page + 5, 3, 0, page, 9, 33, 1, 17, 5),
    }


def _parts(declared: Capabilities, case: Case) -> list[tuple[str, bool]]:
    """KV splits, and whether the backend merges them."""
    as_given = case.kv_dtype != "same" and case.mode in declared.new_rows_as_given
    if not declared.lse or as_given:
        return []
    parts = [text for kind in declared.lse.kinds(case.mode) for text in _PARTS[kind]]
    mine = [(text, True) for text in parts if declared.lse.merges and text != "whole"]
    return [(text, False) for text in parts] + mine


def _may_fit(declared: Capabilities, case: Case, variant: ServerVariant) -> bool:
    minimal = replace(case, window=-1, rows=Verify(chain(2)) if case.tree else case.rows)
    return variant.fits(declared, minimal)


def _rows(declared: Capabilities, mode: ForwardMode) -> list[Any]:
    if mode is ForwardMode.TARGET_VERIFY:
        return [tree for tree in _TREES if tree.topk <= declared.max_topk]
    if mode is ForwardMode.DRAFT_DECODE:
        return [draft for draft in _DRAFTS if draft.branches <= declared.max_draft_branches]
    if mode is ForwardMode.EXTEND:
        return list(_NEW)
    return [(width, pattern) for width in _WIDTHS for pattern in _ACCEPTED] if mode.is_speculative() else []


def _width(rows: Any) -> int:
    """Rows of a request that a tree or a draft-extend has."""
    return len(rows) if isinstance(rows, Tree) else rows[0] if isinstance(rows, tuple) else 1


def _changed(declared: Capabilities, case: Case, drawn: Mapping[str, Any]) -> Case | None:
    """``case`` with the drawn values; None if that is not a case, or is not declared."""
    prefixes = _batches(case)[drawn.get("batch", "own")]
    parts, own_merge = drawn.get("parts", (case.parts, case.own_merge))
    try:
        changed = replace(
            case,
            prefixes=prefixes,
            layout=drawn["layout"],
            data=drawn["data"],
            bucket=len(prefixes) + drawn["slack"],
            padding=drawn["padding"] if drawn["slack"] else "prod",
            rows=_rows_of(declared, case, drawn, len(prefixes)),
            layers=drawn.get("layers", case.layers),
            parts=parts,
            own_merge=own_merge,
            variants=case.variants | SERVER_VARIANTS.keys() & drawn.keys(),
        )
    except ValueError:
        return None
    few = len(changed.variants) <= _MOST_VARIANTS
    return changed if few and all_fit(declared, changed) and within_declared(declared, changed) else None


def _rows_of(declared: Capabilities, case: Case, drawn: Mapping[str, Any], count: int) -> Rows:
    """Rows of ``count`` requests. Raises ``ValueError`` for an accepted count beyond its width."""
    chosen, rows = drawn.get("rows"), case.rows
    match rows:
        case Extend():
            new, room = rows.new, rows.room
            if chosen is not None:
                pattern = _NEW[chosen]
                new = tuple(min(pattern[min(at, len(pattern) - 1)], declared.max_extend_tokens) for at in range(count))
                room = room_for(new)
            return replace(rows, new=new, room=room, chunks=drawn.get("chunks", rows.chunks))
        case Accepted() if chosen is not None:
            width, pattern = chosen
            return replace(rows, new=accepted(pattern, width, count), width=width)
        case Verify() if chosen is not None:
            return Verify(chosen)
        case Drafted() if chosen is not None:
            return replace(rows, draft=chosen)
    return rows
