"""Helpers for numbers: a selection of many, the numbers between two, and how lists are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby

from ...contract import Capabilities
from ..fields import Changes, Fields

MOST_REQUESTS = 1 << 17
"""Requests of a batch in a case id; the largest case of a catalogue has 1,009."""
_FEW = 8
"""The most declared values below the case's own value that are all tried. If there are more: powers of two, and the two
largest."""
_MOST_LISTED = 8
"""The number of runs to which longer lists of numbers are shortened."""


def nearest(values: Collection[int], to: int) -> int:
    """Return the declared value that is nearest to a usual one; of two equally near ones the smaller."""
    return min(values, key=lambda value: (abs(value - to), value))


def some_of(values: Collection[int], count: int) -> list[int]:
    """The smallest value, the largest, and some between them."""
    values = sorted(values)
    if len(values) <= count:
        return values
    step = (len(values) - 1) / (count - 1)
    return [values[round(i * step)] for i in range(count)]


def nearer_numbers(value: int, minimal: int) -> Iterator[int]:
    """Numbers from the middle to the one next to the value: a bisection, if the caller continues after each step."""
    step = abs(value - minimal) // 2
    while step:
        yield value - step if value > minimal else value + step
        step //= 2


def smaller_declared(
    name: str, declared: Callable[[Capabilities], Iterable[int]]
) -> Callable[[Capabilities, Fields, Fields], Iterator[Changes]]:
    """``Simpler.steps`` of a field whose values a backend lists."""

    def steps(capabilities: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
        below = [value for value in sorted(declared(capabilities)) if value < getattr(case, name)]
        few = len(below) <= _FEW
        yield from ({name: value} for value in below if few or not value & (value - 1) or value in below[-2:])

    return steps


def numbers_word(values: tuple[int, ...]) -> str:
    """(5, 5, 9) -> ``5x2.9``."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return ".".join(str(value) if times == 1 else f"{value}x{times}" for value, times in runs)


def read_numbers(text: str) -> tuple[int, ...]:
    """``5x2.9`` -> (5, 5, 9)."""
    values: list[int] = []
    for part in text.split("."):
        value, _, times = part.partition("x")
        values += [int(value)] * int(times or 1)
    return tuple(values)


def listed(values: Sequence[int]) -> str:
    """1, 3, 3, 3 -> ``1, 3 x 3``: the second number is a count."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    words = [f"{value} x {times}" if times > 2 else ", ".join([str(value)] * times) for value, times in runs]
    if len(words) <= _MOST_LISTED:
        return ", ".join(words)
    return f"{', '.join(words[:_MOST_LISTED])}, ... ({len(values)} in all, {min(values)} to {max(values)})"
