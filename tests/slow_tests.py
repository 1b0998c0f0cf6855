"""Tests that take long: a pull request runs them on one Python and the others on all, and they start first.

A row is the beginning of a node id below ``tests/``, slowest first. What belongs here takes a second of a core, or its
file does: `pytest --durations=60` says which. `tests/ci/test_slow_tests.py` asks that every row names tests.
"""

from __future__ import annotations

import pytest

SLOW: tuple[str, ...] = ("new/test_new.py::test_what_it_prints_can_be_typed_and_is_green",)

_SLOW = tuple(f"tests/{start}" for start in SLOW)


def slow_first(items: list[pytest.Item]) -> None:
    """Marks slow items, and puts them in front in the order of the table; the others stay in theirs.

    One that starts last keeps one core busy while the others have nothing left to do.
    """
    slow: dict[pytest.Item, int] = {}
    for item in items:
        if item.nodeid.startswith(_SLOW):
            item.add_marker(pytest.mark.slow)
            slow[item] = next(row for row, start in enumerate(_SLOW) if item.nodeid.startswith(start))
    items.sort(key=lambda item: slow.get(item, len(_SLOW)))
