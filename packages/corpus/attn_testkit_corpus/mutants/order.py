"""Order in which case-runs are tried on a mutant: first those that kill the most mutants near it per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from attn_testkit.cases.case import parse_case
from attn_testkit.running.planning.request import Item

from .operators import Mutant

_ELSEWHERE = 1 / 8
"""Weight of a mutant of another function; one of the same function counts 1."""
_KILLS_BEFORE, _TRIES_BEFORE = 0.1, 0.5
"""Kills and tries assumed before a case-run was tried: low, so that killers of nearby mutants come before unknown ones;
and so few that this changes if the next nearby mutants survive."""
_OF_THE_SAME_KIND = 0.6
"""Factor on a case-run's value for each earlier case-run of its mode and execution."""
_START_S = 0.1
_HALF_AS_VALUABLE = 10
"""Rank, if there are ranks, at which an item is worth half as much as the first."""


def name_of(item: Item) -> str:
    """``eager:CASE`` or ``graph:CASE``."""
    return f"{item.execution}:{item.case}"


class Order:
    """Order that learns from kills. No verdict depends on it: a survivor has seen every case-run that reaches it."""

    def __init__(self, items: Sequence[Item], seconds: Mapping[str, float], *, ranked: bool = False) -> None:
        """``seconds``: time of each case-run without a mutant. ``ranked``: true if the first items are the most
        valuable."""
        self._rank = {name_of(item): index for index, item in enumerate(items)} if ranked else {}
        self._items = [(name_of(item), item, parse_case(item.case).inference_mode) for item in items]
        self._seconds = seconds
        self._tries, self._kills = _Counts(), _Counts()

    def learn(self, mutant: Mutant, tried: Iterable[str], killer: str = "") -> None:
        """Note that these case-runs were tried on a mutant, and that the killer, if any, killed it."""
        for name in tried:
            self._tries.add(mutant, name)
        if killer:
            self._kills.add(mutant, killer)

    def of(self, mutant: Mutant, names: Collection[str]) -> list[Item]:
        """The items with these names. As in a run, everything under no_grad comes before everything under
        inference_mode."""

        def worth(name: str) -> float:
            kills = _KILLS_BEFORE + self._kills.near(mutant, name)
            rate = kills / (_TRIES_BEFORE + self._tries.near(mutant, name))
            rank = 1.0 + self._rank.get(name, 0) / _HALF_AS_VALUABLE
            return rate / rank / (_START_S + self._seconds.get(name, 1.0))

        chosen = [(worth(name), entry) for entry in self._items if (name := entry[0]) in names]
        chosen.sort(key=lambda pair: -pair[0])
        before: Counter[tuple[str, str]] = Counter()
        found: list[tuple[bool, float, int, Item]] = []
        for value, (_, item, inference) in chosen:
            kind = (item.mode, item.execution)
            found.append((inference, -value * _OF_THE_SAME_KIND ** before[kind], len(found), item))
            before[kind] += 1
        return [entry[3] for entry in sorted(found, key=lambda entry: entry[:3])]


class _Counts:
    """Counts of an event for the mutants of a function, and of a module."""

    def __init__(self) -> None:
        self._of_function: Counter[tuple[str, str, str]] = Counter()
        self._of_module: Counter[tuple[str, str]] = Counter()

    def add(self, mutant: Mutant, run: str) -> None:
        """Count once more."""
        self._of_function[mutant.path, mutant.scope, run] += 1
        self._of_module[mutant.path, run] += 1

    def near(self, mutant: Mutant, run: str) -> float:
        """Count, weighted by nearness to a mutant."""
        here = self._of_function[mutant.path, mutant.scope, run]
        return here + _ELSEWHERE * (self._of_module[mutant.path, run] - here)
