"""Covering arrays: rows in which each combination of values of two, or of three, dimensions stands together.

covertable makes them. Its greedy choice goes through all combinations in Python for every value of every row, which is
half a minute for the triples of ``full``. The choice here is the same, and looks for them with numpy: rows decide case
ids, and a test holds them against covertable's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from covertable import make
from covertable.sorters import hash as by_hash

__all__ = ["covering_array"]


def covering_array(sizes: tuple[int, ...], strength: int, salt: str) -> list[list[int]]:
    """Rows of indices into dimensions of ``sizes`` values, in which any ``strength`` dimensions have all combinations.

    ``salt``: other rows for the same sizes.
    """
    factors = [list(range(size)) for size in sizes]
    rows: list[list[int]] = make(factors, strength=strength, sorter=by_hash, salt=salt, criterion=_Greedy())
    return rows


class _Greedy:
    """covertable's ``criteria.greedy`` for arrays without constraints, of one array."""

    def __init__(self) -> None:
        self._combinations: list[tuple[int, ...]] = []

    def extract(self, ctrl: Any) -> Iterator[tuple[int, ...]]:
        """The combinations to put into a row, one after the other.

        ``ctrl``: covertable's ``Controller``. A value has a serial number over all dimensions, a combination is a tuple
        of them, ascending.
        """
        if not self._combinations:
            self._combinations = list(ctrl.incomplete)
            self._places = {each: place for place, each in enumerate(self._combinations)}
            self._serials = np.array(self._combinations)
            self._dimensions = np.array([ctrl.parents[n] for n in range(len(ctrl.parents))])[self._serials]
        # Of those that are missing, ascending, what the row leaves room for.
        near = np.fromiter(map(self._places.__getitem__, ctrl.incomplete), dtype=np.int64, count=len(ctrl.incomplete))
        while not ctrl.is_filled():
            chosen = np.full(len(ctrl.factors), -1)
            chosen[list(ctrl.row)] = list(ctrl.row.values())
            there = chosen[self._dimensions[near]]
            free = there < 0
            fresh = free.sum(1)
            near = near[(free | (there == self._serials[near])).all(1) & (fresh > 0)]
            best = self._best(near, ctrl)
            if best is None:
                return
            yield best

    def _best(self, near: np.ndarray, ctrl: Any) -> tuple[int, ...] | None:
        """The first combination that completes many others, or the one that completes most."""
        best, most = None, 0
        places: list[int] = near.tolist()
        for place in places:
            combination = self._combinations[place]
            new = [serial for serial in combination if ctrl.parents[serial] not in ctrl.row]
            found = _completed(new, list(ctrl.row.values()), ctrl)
            if found + ctrl.tolerance > len(ctrl.row) * len(new):
                return combination
            if found > most:
                best, most = combination, found
        return best


def _completed(new: list[int], old: list[int], ctrl: Any) -> int:
    """How many combinations that are still missing a row of ``old`` values has with ``new`` ones, and not without."""
    missing, size = ctrl.incomplete, ctrl.strength
    return sum(
        tuple(sorted((*some, *others))) in missing
        for count in range(1, min(len(new), size) + 1)
        for some in combinations(new, count)
        for others in combinations(old, size - count)
    )
