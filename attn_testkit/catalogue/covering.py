"""Covering arrays: rows in which each combination of values of two, or of three, dimensions occurs together.

The greedy choice is covertable's, and so is the order in which combinations are looked at: rows decide case ids, and a
test compares them with covertable's own. The library counts in Python, combination by combination and row by row, which
is half a minute for the triples of ``full``; here numpy counts for all of them at once.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import combinations, pairwise, permutations

import numpy as np
import numpy.typing as npt

_AT_ONCE = 256
"""Combinations that are counted together: the first that is good enough is seldom far."""
_FREE, _TAKEN, _OTHER = 3, 1, 0
"""A value that a row may still take, has, or has another one instead of. Of several values ``&`` is ``_OTHER`` where
one does not fit, and ``|`` is ``_FREE`` where one is new."""
Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]


def covering_array(
    sizes: tuple[int, ...],
    strength: int,
    salt: str,
    unpaired: Collection[tuple[int, int]] = (),
    most: int | None = None,
) -> list[list[int]]:
    """Rows of indices into dimensions of ``sizes`` values, in which any ``strength`` dimensions have all combinations.

    ``strength``: 2 or 3. ``salt``: other rows for the same sizes. ``unpaired``: dimensions, by their numbers, whose
    values need not meet. A dimension without a pair has all of its values as often, in no order. ``most``: only so many
    of the first rows.
    """
    # A value has a serial number over all dimensions, a combination is a tuple of them, ascending.
    firsts = np.cumsum([0, *sizes])
    serials = [np.arange(first, first + size) for first, size in zip(firsts.tolist(), sizes, strict=False)]
    every = [
        np.stack(np.meshgrid(*[serials[each] for each in some], indexing="ij")).reshape(strength, -1)
        for some in combinations(range(len(sizes)), strength)
        if not any(pair in unpaired for pair in combinations(some, 2))
    ]
    order: Ints = np.concatenate(every, axis=1)
    order = order[:, np.argsort(_hashes(order, salt), kind="stable")]
    missing = np.zeros((int(firsts[-1]),) * strength, dtype=np.int32)
    for axes in permutations(range(strength)):
        missing[tuple(order[axis] for axis in axes)] = 1
    flat = np.ravel_multi_index(tuple(order), missing.shape)
    dimension_of = np.repeat(np.arange(len(sizes)), sizes)
    rows: list[list[int]] = []
    while order.size and len(rows) != most:
        row = _row(order, dimension_of, missing, firsts)
        rows.append((row - firsts[:-1]).tolist())
        missing[np.ix_(*[row] * strength)] = 0
        left = np.flatnonzero(missing.ravel().take(flat))
        order, flat = order.take(left, axis=1), flat.take(left)
    for number, size in enumerate(sizes):
        if all(tuple(sorted((number, other))) in unpaired for other in range(len(sizes)) if other != number):
            draws = random.Random(f"{salt} {number}")
            turns = [value for _ in range(0, len(rows), size) for value in draws.sample(range(size), size)]
            for found, value in zip(rows, turns, strict=False):
                found[number] = value
    return rows


def _hashes(order: Ints, salt: str) -> npt.NDArray[np.uint32]:
    """Hash each combination as covertable does: FNV-1a of its serials with commas between them, a space, the salt."""
    hashes = np.full(order.shape[1], 0x811C9DC5, dtype=np.uint32)

    def add(codes: Ints | int) -> npt.NDArray[np.uint32]:
        return (hashes ^ np.asarray(codes, dtype=np.uint32)) * np.uint32(0x01000193)

    for place, serials in enumerate(order):
        hashes = add(ord(",")) if place else hashes
        for digit in reversed(range(len(str(order.max())))):
            written = (serials >= 10**digit) | (digit == 0)
            hashes = np.where(written, add(serials // 10**digit % 10 + ord("0")), hashes)
    for code in f" {salt}".encode():
        hashes = add(code)
    return hashes


def _row(order: Ints, dimension_of: Ints, missing: Counts, firsts: Ints) -> Ints:
    """The serials of one row. Combinations are put into it one after the other: the first one that completes as many
    as it can of those that are missing, or the one that completes most; what is left open is the first of its values.

    ``order`` [strength, combinations]: what is missing. ``dimension_of``: the dimension of each serial.
    """
    row = np.full(len(firsts) - 1, -1)
    state = np.full(len(dimension_of), _FREE, dtype=np.uint8)
    # By how many values are new: serials of those -> missing combinations that they make with others of the row.
    tables = [np.zeros(missing.shape[:count], np.int32) for count in range(1, missing.ndim)]
    best = 0
    while True:
        for serial in order[:, best].tolist():
            dimension = dimension_of[serial]
            if row[dimension] < 0:
                row[dimension] = serial
                state[firsts[dimension] : firsts[dimension + 1]] = _OTHER
                state[serial] = _TAKEN
                for table, larger in pairwise([*tables, missing]):
                    table += larger[serial]  # all of them are symmetric
        # Of those that are missing, what the row leaves room for.
        states = state.take(order)
        near = np.flatnonzero((np.bitwise_and.reduce(states) != _OTHER) & (np.bitwise_or.reduce(states) == _FREE))
        if not len(near):
            return np.where(row < 0, firsts[:-1], row)
        order, new = order.take(near, axis=1), (states.take(near, axis=1) == _FREE).sum(0)
        for table in tables:  # a value that is not new completes nothing
            for axis in range(table.ndim):
                table.swapaxes(0, axis)[state != _FREE] = 0
        best = _best(order, new, tables, int((row >= 0).sum()))


def _best(order: Ints, new: Ints, tables: list[Counts], filled: int) -> int:
    """Index into ``order`` of the combination that is put into a row of ``filled`` values next. ``new`` [combinations]:
    how many of its values are.
    """
    most, best, enough = 0, 0, filled * new
    for start in range(0, order.shape[1], _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        completed = _completed(order[:, some], new[some], tables)
        full = np.flatnonzero(completed > enough[some])
        if len(full):
            return start + int(full[0])
        if completed.max() > most:
            most, best = int(completed.max()), start + int(completed.argmax())
    return best


def _completed(order: Ints, new: Ints, tables: list[Counts]) -> Ints:
    """Number of missing combinations that a row has with the new values of each of ``order``, and not without."""
    found: Ints = (new == len(order)).astype(np.int64)  # itself
    for count, table in enumerate(tables, start=1):
        for places in combinations(order, count):
            found += table[places]
    return found
