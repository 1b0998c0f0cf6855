"""Hint objects, one per function, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from .evidence import Evidence, Supposed

Found = str | Iterator[Supposed]
"""Text, empty if the evidence does not fit; or answers of supposed mistakes: the first that fits is reported."""


class Level(IntEnum):
    """Strength of a hint. Stronger hints are tried first."""

    CAUSE = 0
    """Cause of everything else that is wrong."""
    SHOWN = 1
    """Results of another place, or an experiment that was right: nothing is left to guess."""
    ANSWER = 2
    """Results of the oracle with one mistake in it (``assumption``). One such mistake is enough."""
    PATTERN = 3
    """Property that the wrong rows, heads or values share."""
    PLACE = 4
    """Property that the wrong requests or KV tokens share."""
    GUESS = 5
    """Possible reasons for wrong KV tokens or for a wrong number."""
    REMARK = 6
    """True statement that is rarely enough."""


_SILENCED: Mapping[Level, Collection[Level]] = {
    Level.CAUSE: frozenset(Level),
    Level.SHOWN: frozenset({Level.GUESS}),
    Level.ANSWER: frozenset({Level.ANSWER, Level.GUESS}),
}
"""Level of a hint that fits -> levels that are not tried any more."""


@dataclass(frozen=True)
class Hint:
    """One named pattern of failure. A call with evidence gives its text, or nothing."""

    find: Callable[[Evidence], Found]
    level: Level
    when: Callable[[Evidence], bool]
    silences: tuple[str | Level, ...]
    """Names or levels of hints that would only guess at the cause that this hint names, in addition to
    ``_SILENCED``."""
    family: str = "softmax"
    """Name of the family of layers to whose failures the hint applies."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.find.__name__

    @property
    def place(self) -> tuple[str, int]:
        """File and line. Hints of one level are tried in this order."""
        code = self.find.__code__
        return code.co_filename, code.co_firstlineno

    def __call__(self, evidence: Evidence) -> str:
        """Return the text if the evidence fits, else an empty string."""
        if not self.when(evidence):
            return ""
        found = self.find(evidence)
        if isinstance(found, str):
            return found
        return next((supposed.text for supposed in found if evidence.right_for(supposed)), "")

    def silences_other(self, other: Hint) -> bool:
        """Return whether the other hint is superfluous once this one fits."""
        by_level = other.level in _SILENCED.get(self.level, ())
        return other is not self and (by_level or other.name in self.silences or other.level in self.silences)


HINTS: dict[str, Hint] = {}
"""Imported hints by name."""


def hint(
    level: Level,
    *,
    when: Callable[[Evidence], bool] = lambda _: True,
    silences: tuple[str | Level, ...] = (),
    family: str = "softmax",
) -> Callable[[Callable[[Evidence], Found]], Hint]:
    """Turn a function into a hint and put it into ``HINTS``.

    ``when``: true if the hint may apply. ``family``: the layers whose failures it is about.
    """

    def made(find: Callable[[Evidence], Found]) -> Hint:
        assert find.__name__ not in HINTS, f"two hints are named {find.__name__}"
        HINTS[find.__name__] = found = Hint(find, level, when, silences, family)
        return found

    return made


def assumption(
    when: Callable[[Evidence], bool], *, silences: tuple[str | Level, ...] = ()
) -> Callable[[Callable[[Evidence], Found]], Hint]:
    """Turn a function that yields answers of supposed mistakes into a hint."""
    return hint(Level.ANSWER, when=when, silences=silences)


def in_order(hints: Iterable[Hint]) -> tuple[Hint, ...]:
    """Sort by level and place; a hint comes before the hints that it silences by name.

    Raises ``ValueError`` if a name in ``silences`` is unknown, or if hints silence each other.
    """
    waiting = sorted(hints, key=lambda each: (each.level, each.place))
    unknown = {name for each in waiting for name in each.silences if isinstance(name, str)} - {h.name for h in waiting}
    if unknown:
        raise ValueError(f"hints silence {', '.join(sorted(unknown))}, but no hint has that name")
    order: list[Hint] = []
    while waiting:
        free = (each for each in waiting if not any(each.name in other.silences for other in waiting))
        first = next(free, None)
        if first is None:
            raise ValueError(f"hints silence each other: {', '.join(each.name for each in waiting)}")
        waiting.remove(first)
        order.append(first)
    return tuple(order)
