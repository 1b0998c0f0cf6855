"""The minimal case of a mode: one request, with the smallest declared values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, final

from ..cases.case import Case
from ..cases.features.feature import Draws, Without
from ..cases.features.heads import smallest_heads_first
from ..cases.features.table import FEATURES
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import minimal_rows
from ..contract import Capabilities, ForwardMode

T = TypeVar("T")

_FEW_KEYS, _SOME_KEYS = 5, 21


@final
class _Simplest:
    """Draws that give the simplest value each time."""

    def one_of(self, values: Sequence[T], /) -> T:
        return values[0]

    def number(self, low: int, high: int, /) -> int:
        return low

    def numbers(self, count: tuple[int, int], *ranges: tuple[int, int]) -> tuple[int, ...]:
        return (ranges[0][0],) * count[0]


def drawn_case(draws: Draws, declared: Capabilities, mode: ForwardMode) -> Case:
    """A case of values that each feature draws. Raises ``ValueError`` if the capabilities leave no head layout."""
    if not smallest_heads_first(declared):
        raise ValueError(f"{mode} is declared, but no head layout that goes with it is")
    values: dict[str, Any] = {"rows": minimal_rows(mode)}
    for feature in FEATURES:
        if not isinstance(feature.random, Without):
            values |= feature.random(draws, declared, values)
    return nearest_declared(declared, Case(**values))


def minimal_case(declared: Capabilities, mode: ForwardMode) -> Case:
    """The case of the simplest value in every feature: one request without keys, of one row. Raises ``ValueError`` if
    the capabilities leave no head layout.
    """
    return drawn_case(_Simplest(), declared, mode)


def minimal_cases(declared: Capabilities, mode: ForwardMode) -> Iterator[Case]:
    """The minimal case, and the one to use if it fails: the same case with a prefix."""
    minimal = minimal_case(declared, mode)
    yield minimal
    # A request of an encoder has no prefix.
    for keys in (_FEW_KEYS, _SOME_KEYS) if minimal.encoder == "none" else ():
        yield minimal.with_changes(prefixes=(keys,))
