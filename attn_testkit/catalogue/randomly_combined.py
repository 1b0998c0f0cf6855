"""Cases with more in them: another batch, other rows, KV splits, server variants, layers that differ, padding.

A program chooses a path by any of these, and a bug may need two at once. Named cases are made for one thing each, with
usual values of everything else. Here each case of an array takes what none before it has together, and those that are
made for two things, such as a server variant and options of a layer, take other slots, data and padding. None of it
adds a case.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, cycle, islice
from typing import Any

from ..cases.case import Case
from ..cases.declared import within_declared
from ..cases.dimensions.dimension import Combined, Kept
from ..cases.dimensions.table import DIMENSIONS
from ..cases.server_variants import SERVER_VARIANTS, all_fit
from ..contract import Capabilities

_DRAWS = 60
"""Draws for each case. Twice as many meet hardly more."""
_FEWEST = 12
_MOST_VARIANTS = 2
"""Server variants of a case. Bugs that need a third are rare, and each of them excludes batches and rows of others."""
_WEIGHT_OF_VARIANTS = 20
_COMBINED = sorted(
    (each.combined for each in DIMENSIONS if isinstance(each.combined, Combined)), key=lambda combined: combined.order
)
_KEPT = [name for each in DIMENSIONS if isinstance(each.combined, Kept) for name in each.combined.names]

_Feature = tuple[str, Any]


def randomly_combined(declared: Capabilities, cases: Sequence[Case]) -> Iterator[Case]:
    """Each of ``cases``, which are of one mode, with what meets most that none before it has together.

    Heads, head dims, dtypes, page sizes, layouts of the pool and options stay as they are.
    """
    met: set[tuple[_Feature, _Feature]] = set()
    layouts: set[str] = set()
    # A short array, of few capabilities, has cases again: they take something else then.
    count = max(_FEWEST, len(cases)) if cases else 0
    for number, case in enumerate(islice(cycle(cases), count)):
        own, more = _features(case), _to_combine(declared, case)
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
            ("kind", (case.variants, case.kv_splits, case.merged_by_backend, case.layers)),
            ("kv_dtype", case.kv_dtype),
            *((word, word) for word in SERVER_VARIANTS if word in case.variants),
        ]
        of_kind = _to_combine(declared, case)
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
    return {name: value for name, value in found if value is not None}


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
    """Values that the case keeps. What a case does not have meets nothing: it would only change what is drawn."""
    found = ((name, getattr(case, name)) for name in _KEPT)
    return [(name, value) for name, value in found if value is not None]


def _weight(pair: tuple[_Feature, _Feature]) -> int:
    """Two server variants are met in few cases, and most of those that are drawn are refused."""
    return _WEIGHT_OF_VARIANTS if pair[0][0] in SERVER_VARIANTS and pair[1][0] in SERVER_VARIANTS else 1


def _pairs(own: Sequence[_Feature], drawn: Mapping[str, Any]) -> set[tuple[_Feature, _Feature]]:
    new = list(drawn.items())
    return {(old, each) for old in own for each in new} | set(combinations(new, 2))


def _to_combine(declared: Capabilities, case: Case) -> dict[str, list[Any]]:
    """Name -> values of which a case takes one."""
    return {name: [*values] for of in _COMBINED for name, values in of.values(declared, case).items()}


def _changed(declared: Capabilities, case: Case, drawn: Mapping[str, Any]) -> Case | None:
    """None if there is no such case, or if it needs more than is declared."""
    changes: dict[str, Any] = {}
    try:
        for dimension in DIMENSIONS:
            if isinstance(dimension.combined, Combined):
                changes |= dimension.combined.fields(declared, case, drawn, changes)
        changed = case.with_changes(**changes)
    except ValueError:
        return None
    few = len(changed.variants) <= _MOST_VARIANTS
    return changed if few and all_fit(declared, changed) and within_declared(declared, changed) else None
