"""Covering arrays: rows in which each combination of values of two, or of three, columns occurs, but no excluded pair.
A row is made greedily: it begins with the first missing combination, then gets the one that completes most others, and
so on. numpy counts for all combinations at once. Libraries that count in Python need half a minute for the triples of
``full``, and libraries with constraints call a function for each combination.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Sequence
from itertools import combinations, pairwise, permutations

import numpy as np
import numpy.typing as npt

_AT_ONCE = 256
"""Number of combinations that are counted together: a combination that is good enough is usually among them."""
_FREE, _TAKEN, _OTHER = 3, 1, 0
"""States of a value in a row: still possible, chosen, or no longer possible. For several values, ``&`` is ``_OTHER`` if
one is not possible, and ``|`` is ``_FREE`` if one is not chosen yet."""
Value = tuple[int, int]
"""Number of a column, and of one of its values."""
Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]
_PLAIN = 1e6
"""A number of uses that no value reaches."""


def covering_array(
    sizes: tuple[int, ...],
    strength: int,
    salt: str,
    unpaired: Collection[tuple[int, int]] = (),
    excluded: Collection[tuple[Value, Value]] = (),
    later: Collection[int] = (),
    alone: int = 0,
) -> list[list[int]]:
    """Rows of indices into columns of ``sizes`` values, in which any ``strength`` columns have all combinations.

    ``strength``: 2 or 3. ``salt``: other rows for the same sizes. ``unpaired``: numbers of columns whose values need
    not occur together. In a column without any pair, all values occur about equally often. ``excluded``: pairs of
    values that no row has together. ``later``: columns that keep their first value in the first ``alone`` rows. A
    combination that fits into no row is left out.
    """
    firsts = np.cumsum([0, *sizes])
    clash = _clashes(firsts, excluded)
    some = [number for number in range(len(sizes)) if number not in later]
    # Open columns take their values in turn, but those of ``later`` the first one.
    parts = (_PLAIN * np.arange(size) if at in later else np.zeros(size) for at, size in enumerate(sizes))
    uses: Numbers = np.concatenate([*parts])
    rows: list[Ints] = []
    for columns in (some, range(len(sizes))) if later else (some,):
        missing = _missing(columns, firsts, strength, unpaired, clash, rows)
        fixed = [int(firsts[number]) for number in range(len(sizes)) if number not in columns]
        rows += _rows(missing, firsts, clash, salt, fixed, alone if fixed else None, uses)
    found = [(row - firsts[:-1]).tolist() for row in rows]
    for number in range(len(sizes)):
        if all(tuple(sorted((number, other))) in unpaired for other in range(len(sizes)) if other != number):
            _spread(found, number, firsts, clash, random.Random(f"{salt} {number}"))
    return found


def _clashes(firsts: Ints, excluded: Collection[tuple[Value, Value]]) -> Bools:
    """[value, value]: True for two values that no row has together, by their serial numbers over all columns."""
    found = np.zeros((int(firsts[-1]),) * 2, dtype=bool)
    for (one, value), (other, second) in excluded:
        at = int(firsts[one]) + value, int(firsts[other]) + second
        found[at] = found[at[::-1]] = True
    return found


def _missing(
    columns: Sequence[int],
    firsts: Ints,
    strength: int,
    unpaired: Collection[tuple[int, int]],
    clash: Bools,
    rows: Sequence[Ints],
) -> Counts:
    """1 for each combination of serials, in any order, that ``columns`` need and ``rows`` do not have."""
    missing = np.zeros((int(firsts[-1]),) * strength, dtype=np.int32)
    for some in combinations(columns, strength):
        if not any(pair in unpaired for pair in combinations(some, 2)):
            for axes in permutations(some):
                missing[tuple(slice(firsts[axis], firsts[axis + 1]) for axis in axes)] = 1
    for one, other in combinations(range(strength), 2):
        shape = [1] * strength
        shape[one] = shape[other] = len(clash)
        missing[np.broadcast_to(clash.reshape(shape), missing.shape)] = 0
    for row in rows:
        missing[np.ix_(*[row] * strength)] = 0
    return missing


def _rows(
    missing: Counts, firsts: Ints, clash: Bools, salt: str, fixed: Sequence[int], most: int | None, uses: Numbers
) -> list[Ints]:
    order: Ints = np.stack(np.nonzero(missing)).astype(np.int64)
    order = order[:, (np.diff(order, axis=0) > 0).all(0)]
    order = order[:, np.argsort(_mixed(order, salt), kind="stable")]
    flat = np.ravel_multi_index(tuple(order), missing.shape)
    column_of = np.repeat(np.arange(len(firsts) - 1), np.diff(firsts))
    rows: list[Ints] = []
    while order.size and len(rows) != most:
        row = _row(order, column_of, missing, firsts, clash, fixed, uses)
        if row is None:
            order, flat = order[:, 1:], flat[1:]  # it fits into no row
            continue
        rows.append(row)
        uses[row] += uses[row] < _PLAIN
        missing[np.ix_(*[row] * len(order))] = 0
        left = np.flatnonzero(missing.ravel().take(flat))
        order, flat = order.take(left, axis=1), flat.take(left)
    return rows


def _mixed(order: Ints, salt: str) -> npt.NDArray[np.uint64]:
    """A pseudo-random number for each combination, the same on each machine."""
    found = np.full(order.shape[1], zlib.crc32(salt.encode()), dtype=np.uint64)
    for serials in order:
        found = (found ^ serials.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


def _row(
    order: Ints, column_of: Ints, missing: Counts, firsts: Ints, clash: Bools, fixed: Sequence[int], uses: Numbers
) -> Ints | None:
    """The serials of one row; None if the first combination fits into no row. Combinations are added one after the
    other: each is the first one that completes as many missing combinations as it can, or the one that completes most.
    Columns that remain open get the least used value that fits.

    ``order`` [strength, combinations]: missing combinations. ``column_of``: the column of each serial. ``fixed``:
    serials that the row has from the beginning.
    """
    row = np.full(len(firsts) - 1, -1)
    state = np.full(len(column_of), _FREE, dtype=np.uint8)
    # By how many values are new: serials of those -> missing combinations that they make with others of the row.
    tables = [np.zeros(missing.shape[:count], np.int32) for count in range(1, missing.ndim)]

    def take(serial: int) -> None:
        column = column_of[serial]
        row[column] = serial
        state[firsts[column] : firsts[column + 1]] = _OTHER
        state[clash[serial] & (state == _FREE)] = _OTHER
        state[serial] = _TAKEN
        for table, larger in pairwise([*tables, missing]):
            table += larger[serial]  # all of them are symmetric

    for serial in fixed:
        take(serial)
    filled = None
    best = 0
    while True:
        before = row.copy(), state.copy(), [table.copy() for table in tables]
        for serial in order[:, best].tolist():
            if row[column_of[serial]] < 0:
                take(serial)
        rest = _filled(row, state, firsts, clash, uses)
        if rest is None and filled is None:
            return None
        if rest is None:  # the others leave no room for it
            row, state, tables = before
            order = np.delete(order, best, axis=1)
        else:
            filled = rest
        # Of those that are missing, what the row leaves room for.
        states = state.take(order)
        near = np.flatnonzero((np.bitwise_and.reduce(states) != _OTHER) & (np.bitwise_or.reduce(states) == _FREE))
        if not len(near):
            return filled
        order, new = order.take(near, axis=1), (states.take(near, axis=1) == _FREE).sum(0)
        for table in tables:  # a value that is not new completes nothing
            for axis in range(table.ndim):
                table.swapaxes(0, axis)[state != _FREE] = 0
        best = _best(order, new, tables, int((row >= 0).sum()))


def _filled(row: Ints, state: npt.NDArray[np.uint8], firsts: Ints, clash: Bools, uses: Numbers) -> Ints | None:
    """``row`` with the least used value that fits in each open column; None if no value fits."""
    columns = np.flatnonzero(row < 0)
    costs = np.where(state == _FREE, uses, np.inf)
    ranges = list(zip(firsts[columns].tolist(), firsts[columns + 1].tolist(), strict=True))
    chosen = [first + int(costs[first:end].argmin()) for first, end in ranges]
    if not np.isfinite(costs[chosen]).all():
        return None
    if not clash.take(chosen, axis=0).take(chosen, axis=1).any():
        found = row.copy()
        found[columns] = chosen
        return found
    for serial in sorted(range(*ranges[0]), key=lambda each: float(costs[each])):
        if np.isfinite(costs[serial]):
            more, narrower = row.copy(), state.copy()
            more[columns[0]] = serial
            narrower[clash[serial]] = _OTHER
            again = _filled(more, narrower, firsts, clash, uses)
            if again is not None:
                return again
    return None


def _best(order: Ints, new: Ints, tables: list[Counts], filled: int) -> int:
    """Index into ``order`` of the combination that is added next to a row of ``filled`` values. ``new`` [combinations]:
    number of new values in each.
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
    """Number of missing combinations that a row completes only with the new values of each entry of ``order``."""
    found: Ints = (new == len(order)).astype(np.int64)  # itself
    for count, table in enumerate(tables, start=1):
        for places in combinations(order, count):
            found += table[places]
    return found


def _spread(rows: Sequence[list[int]], number: int, firsts: Ints, clash: Bools, draws: random.Random) -> None:
    """Fill a column that is paired with no other: each allowed value occurs about equally often, in random order."""
    values = range(int(firsts[number + 1] - firsts[number]))
    uses = [0] * len(values)
    for row in rows:
        others = [int(firsts[at]) + value for at, value in enumerate(row) if at != number]
        allowed = [value for value in values if not clash[firsts[number] + value, others].any()]
        row[number] = min(allowed, key=lambda value: (uses[value], draws.random()), default=row[number])
        uses[row[number]] += 1


def few_rows(
    sizes: Sequence[int],
    count: int,
    excluded: Collection[tuple[Value, Value]] = (),
    later: Collection[int] = (),
    heavy: Collection[int] = (),
    plain: Collection[int] = (),
) -> list[list[int]]:
    """Rows of which every value is in one or more, few pairs of values are in two, and no excluded pair in any.

    ``later``: columns that have each value but the first once, as far as there is a row for it. ``heavy``: columns
    whose pairs are worth more than all others together. ``plain``: columns that have their first value in the first
    row, as those of ``later`` have.
    """
    firsts = np.cumsum([0, *sizes])
    clash = _clashes(firsts, excluded)
    weights = np.ones((len(sizes),) * 2, dtype=np.int64)
    weights[np.ix_([*heavy], [*heavy])] = _HEAVY
    rows = np.array([[(row + at * (at not in plain)) % size for at, size in enumerate(sizes)] for row in range(count)])
    rows += firsts[:-1]
    _place(rows, [*later], firsts, clash)
    found = _Few(rows, clash, weights)
    for _ in range(_MOST_ROUNDS):
        better = False
        for column in range(len(sizes)):
            serials = np.arange(firsts[column], firsts[column + 1])
            kept = column in later or column in plain
            better |= found.improve(column, serials[:0] if column in later else serials, first_stays=kept)
        if not better:
            break
    for row in rows:
        for column in later:
            if clash[row[column], row].any():
                row[column] = firsts[column]
    numbers: list[list[int]] = (rows - firsts[:-1]).tolist()
    return numbers


_HEAVY, _CLASH, _MOST_ROUNDS = 100, 100_000, 100


def _place(rows: Ints, later: Sequence[int], firsts: Ints, clash: Bools) -> None:
    """Put each value but the first of some columns into a row after the first, those that clash most before others."""
    rows[:, later] = firsts[later]
    values = [(column, serial) for column in later for serial in range(firsts[column] + 1, firsts[column + 1])]
    for column, serial in sorted(values, key=lambda each: -int(clash[each[1]].sum())):
        free = [
            int((row[later] != firsts[later]).sum()) if row[column] == firsts[column] and at else len(later)
            for at, row in enumerate(rows)
        ]
        fits = [at for at, row in enumerate(rows) if free[at] < len(later) and not clash[serial, row[later]].any()]
        if fits:
            rows[min(fits, key=lambda at: free[at]), column] = serial


class _Few:
    """Rows that become better by one exchange after another."""

    def __init__(self, rows: Ints, clash: Bools, weights: Ints) -> None:
        self.rows, self.clash, self.weights = rows, clash, weights
        self.met = np.zeros(clash.shape, dtype=np.int64)
        """Number of rows that have two values."""
        for row in rows:
            self.met[np.ix_(row, row)] += 1

    def improve(self, column: int, values: Ints, *, first_stays: bool) -> bool:
        """Exchange the values that two rows have of a column, or give a row another one of ``values``: whichever is
        worth most. False if nothing is better."""
        rows, own, places = self.rows, self.rows[:, column].copy(), np.arange(len(self.rows))
        worth = self.weights[column].copy()
        worth[column] = 0
        # [row whose value it is, row that gets it, other column]
        met, clash = self.met[own][:, rows], self.clash[own][:, rows]
        differs = rows[:, None] != rows[None]
        new = _sum((met == 0) & differs, clash & differs, worth)
        once, clashes = (met == 1)[places, places], clash[places, places]
        lost = _sum(once[:, None] & differs, clashes[:, None] & differs, worth)
        gains = new + new.T - lost - lost.T
        gains[own[:, None] == own[None]] = 0
        if first_stays:
            gains[0] = gains[:, 0] = 0
        one, other = divmod(int(gains.argmax()), len(rows))
        best, changes = int(gains[one, other]), {one: int(own[other]), other: int(own[one])}
        if len(values):
            met, clash = self.met[values][:, rows], self.clash[values][:, rows]
            gains = _sum(met == 0, clash, worth) - _sum(once, clashes, worth)  # [value, row]
            # The last row with a value keeps it.
            gains[:, (own[:, None] == own).sum(0) < 2] = 0
            gains[own - values[0], places] = 0
            if first_stays:
                gains[:, 0] = 0
            value, row = divmod(int(gains.argmax()), len(rows))
            if int(gains[value, row]) > best:
                best, changes = int(gains[value, row]), {row: int(values[value])}
        for row, serial in changes.items() if best > 0 else ():
            others = np.delete(rows[row], column)
            for each, more in ((int(own[row]), -1), (serial, 1)):
                self.met[each, others] += more
                self.met[others, each] += more
            rows[row, column] = serial
        return best > 0


def _sum(new: Bools, clashes: Bools, worth: Ints) -> Ints:
    found: Ints = new @ worth - _CLASH * clashes.sum(-1)
    return found
