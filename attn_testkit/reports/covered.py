"""Values that the case-runs of a run covered, read from the words of their ids, for the reader of a green page.

This module imports neither torch nor the cases: a page is made without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..results.case_result import RAN, CaseResult
from ..results.names import MODES
from .in_common import numbers_of, properties_of

COLUMNS = ("heads", "head dim", "dtype", "KV pool of", "page size", "slot order", "data")
"""Kinds of properties that have a column; others are features."""


@dataclass(frozen=True)
class Covered:
    """Values and features of the cases of one backend and mode."""

    backend: str
    mode: str
    executions: str
    cases: int
    values: Mapping[str, str]
    """Column -> its values, as ``64, 128``."""
    tokens: str
    """Shortest and longest prefix: the tokens of a request before the step."""
    requests: int
    """The most requests of a step."""
    features: str


def covered(results: Iterable[CaseResult]) -> list[Covered]:
    """One row per backend and mode of what ran."""
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        if result.case and result.status in RAN:
            groups.setdefault((result.backend, result.mode), []).append(result)
    order = {mode: number for number, mode in enumerate(MODES)}
    places = sorted(groups, key=lambda place: order.get(place[1], len(order)))
    return [_row(backend, mode, groups[backend, mode]) for backend, mode in places]


def _row(backend: str, mode: str, group: list[CaseResult]) -> Covered:
    ids = list(dict.fromkeys(result.case for result in group))
    found = [properties_of(case) for case in ids]
    values = {name: {value for each in found for kind, value in each if kind == name} for name in COLUMNS}
    features = {kind.strip("`") for each in found for kind, value in each if value == "yes"}
    numbers = [numbers_of(case) for case in ids]
    longest = max(each["keys"] for each in numbers)
    return Covered(
        backend,
        mode,
        ", ".join(dict.fromkeys(result.execution for result in group)),
        len(ids),
        {name: _listed(name, each) for name, each in values.items()},
        f"{min(each['fewest'] for each in numbers):,} to {longest:,}",
        max(each["requests"] for each in numbers),
        ", ".join(sorted(features)),
    )


def _listed(kind: str, values: Iterable[str]) -> str:
    words = (value.removeprefix(kind).strip() for value in values)
    return ", ".join(sorted(words, key=lambda word: (len(word), word)))
