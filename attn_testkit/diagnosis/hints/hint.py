"""What a hint is: one object beside its function, and the order in which all are asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from .evidence import Evidence, Supposed

__all__ = ["HINTS", "Hint", "Level", "assumption", "hint", "in_order"]

Found = str | Iterator[Supposed]
"""A text, empty where the evidence does not fit; or answers that a mistake would give: the first that fits is told."""


class Level(IntEnum):
    """How much a hint tells. What tells more is asked first."""

    CAUSE = 0
    """Everything else follows from it."""
    SHOWN = 1
    """The numbers are those of another place, or an experiment was right: nobody need guess."""
    ANSWER = 2
    """The oracle gives these numbers when it makes the mistake (an ``assumption``); one such mistake is enough."""
    PATTERN = 3
    """The wrong rows, heads or values have something in common."""
    PLACE = 4
    """The wrong requests or KV tokens have."""
    GUESS = 5
    """What wrong KV tokens, or a wrong number, may come from."""
    REMARK = 6
    """True, and seldom enough."""


_SILENCED: Mapping[Level, Collection[Level]] = {
    Level.CAUSE: frozenset(Level),
    Level.SHOWN: frozenset({Level.GUESS}),
    Level.ANSWER: frozenset({Level.ANSWER, Level.GUESS}),
}
"""Level of a hint that fits -> those of the hints that have nothing to say then."""


@dataclass(frozen=True)
class Hint:
    """One named pattern of failure. Called with evidence it gives its text, or nothing."""

    find: Callable[[Evidence], Found]
    level: Level
    when: Callable[[Evidence], bool]
    silences: tuple[str | Level, ...]
    """Names of hints, or levels of hints, that would guess at what this one knows; besides those of its level."""

    @property
    def name(self) -> str:
        """That of its function."""
        return self.find.__name__

    @property
    def place(self) -> tuple[str, int]:
        """Where it is written: of two hints of a level the first in the first file is asked first."""
        code = self.find.__code__
        return code.co_filename, code.co_firstlineno

    def __call__(self, evidence: Evidence) -> str:
        """Its text where it fits, else nothing."""
        if not self.when(evidence):
            return ""
        found = self.find(evidence)
        if isinstance(found, str):
            return found
        return next((supposed.text for supposed in found if evidence.right_for(supposed)), "")

    def silences_other(self, other: Hint) -> bool:
        """Whether the other one has nothing to say where this one fits."""
        by_level = other.level in _SILENCED.get(self.level, ())
        return other is not self and (by_level or other.name in self.silences or other.level in self.silences)


HINTS: dict[str, Hint] = {}
"""Name -> hint, of all that were imported."""


def hint(
    level: Level, *, when: Callable[[Evidence], bool] = lambda _: True, silences: tuple[str | Level, ...] = ()
) -> Callable[[Callable[[Evidence], Found]], Hint]:
    """Make a hint of a function and put it into ``HINTS``. ``when``: whether there is anything to ask."""

    def made(find: Callable[[Evidence], Found]) -> Hint:
        assert find.__name__ not in HINTS, f"two hints are named {find.__name__}"
        HINTS[find.__name__] = found = Hint(find, level, when, silences)
        return found

    return made


def assumption(
    when: Callable[[Evidence], bool], *, silences: tuple[str | Level, ...] = ()
) -> Callable[[Callable[[Evidence], Found]], Hint]:
    """Make a hint of a function that yields what a backend with some mistake would compute, and how that is told."""
    return hint(Level.ANSWER, when=when, silences=silences)


def in_order(hints: Iterable[Hint]) -> tuple[Hint, ...]:
    """By level and place; but who silences another comes before it.

    Raises ``ValueError`` where a name in ``silences`` is no hint's, or two hints silence each other.
    """
    waiting = sorted(hints, key=lambda each: (each.level, each.place))
    unknown = {name for each in waiting for name in each.silences if isinstance(name, str)} - {h.name for h in waiting}
    if unknown:
        raise ValueError(f"hints silence {', '.join(sorted(unknown))}, and no hint is named so")
    order: list[Hint] = []
    while waiting:
        free = (each for each in waiting if not any(each.name in other.silences for other in waiting))
        first = next(free, None)
        if first is None:
            raise ValueError(f"hints silence each other: {', '.join(each.name for each in waiting)}")
        waiting.remove(first)
        order.append(first)
    return tuple(order)
