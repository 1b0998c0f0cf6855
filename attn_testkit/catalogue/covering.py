"""Covering arrays: rows in which each combination of values of two, or of three, dimensions occurs together.

The greedy choice is covertable's, and so is the order in which combinations are looked at: rows decide case ids, and a
test compares them with covertable's own. The library counts in Python, combination by combination and row by row, which
is half a minute for the triples of ``full``; here numpy counts for all of them at once.
"""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product

import numpy as np
import numpy.typing as npt
from covertable.sorters import hash as by_hash

__all__ = ["covering_array"]

_AT_ONCE = 256
"""Combinations that are counted together: the first that is good enough is seldom far."""
Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]


def covering_array(sizes: tuple[int, ...], strength: int, salt: str) -> list[list[int]]:
    """Rows of indices into dimensions of ``sizes`` values, in which any ``strength`` dimensions have all combinations.

    ``strength``: 2 or 3. ``salt``: other rows for the same sizes.
    """
    # A value has a serial number over all dimensions, a combination is a tuple of them, ascending.
    firsts = np.cumsum([0, *sizes])
    serials = [range(first, first + size) for first, size in zip(firsts.tolist(), sizes, strict=False)]
    every = [each for some in combinations(serials, strength) for each in product(*some)]
    order: Ints = np.array(by_hash.sort(every, salt=salt), dtype=np.int64).reshape(-1, strength).T
    dimensions = np.searchsorted(firsts, order, side="right") - 1
    missing = np.zeros((int(firsts[-1]),) * strength, dtype=np.int32)
    for axes in permutations(range(strength)):
        missing[tuple(order[axis] for axis in axes)] = 1
    rows = []
    while order.size:
        row = _row(order, dimensions, missing, firsts)
        rows.append((row - firsts[:-1]).tolist())
        missing[np.ix_(*[row] * strength)] = 0
        left = missing[tuple(order)] > 0
        order, dimensions = order[:, left], dimensions[:, left]
    return rows


def _row(order: Ints, dimensions: Ints, missing: Counts, firsts: Ints) -> Ints:
    """The serials of one row. Combinations are put into it one after the other: the first one that completes as many
    as it can of those that are missing, or the one that completes most; what is left open is the first of its values.

    ``order``, ``dimensions`` [strength, combinations]: what is missing, and the dimensions of its values.
    """
    row = np.full(len(firsts) - 1, -1)
    strength = missing.ndim
    # By how many values are new: serials of those -> missing combinations that they make with others of the row.
    tables = [np.zeros(missing.shape[:count], np.int32) for count in range(1, strength)] + [missing]
    best = 0
    while True:
        for dimension, serial in zip(dimensions[:, best].tolist(), order[:, best].tolist(), strict=True):
            if row[dimension] < 0:
                row[dimension] = serial
                for table, larger in pairwise(tables):
                    table += larger[..., serial]
        # Of those that are missing, what the row leaves room for.
        chosen = row[dimensions]
        free = chosen < 0
        near = np.flatnonzero((free | (chosen == order)).all(0) & free.any(0))
        if not len(near):
            return np.where(row < 0, firsts[:-1], row)
        order, dimensions = order[:, near], dimensions[:, near]
        best = _best(order, free[:, near], tables, int((row >= 0).sum()))


def _best(order: Ints, free: npt.NDArray[np.bool_], tables: list[Counts], filled: int) -> int:
    most, best, enough = 0, 0, filled * free.sum(0)
    for start in range(0, order.shape[1], _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        completed = _completed(order[:, some], free[:, some], tables)
        full = np.flatnonzero(completed > enough[some])
        if len(full):
            return start + int(full[0])
        if completed.max() > most:
            most, best = int(completed.max()), start + int(completed.argmax())
    return best


def _completed(order: Ints, free: npt.NDArray[np.bool_], tables: list[Counts]) -> Ints:
    """Number of missing combinations that a row gains with the free values of each of ``order``."""
    found = np.zeros(order.shape[1], dtype=np.int64)
    for count, table in enumerate(tables, start=1):
        for places in combinations(range(len(tables)), count):
            chosen = list(places)
            found += table[tuple(order[chosen])] * free[chosen].all(0)
    return found
