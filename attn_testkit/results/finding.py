"""A failed check, with data for plots: plain values without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from .rules import rule_of
from .texts import MOST_OTHERS, readable


@dataclass(frozen=True)
class ErrorMap:
    """Error over limit of a wrong step by row and head, the largest over layers and dims.

    There are at most 32 by 32 cells: with more rows or heads, adjacent ones share a cell, which holds their largest
    value.
    """

    ratios: tuple[tuple[float, ...], ...]
    """[rows, heads]; up to 1 is right, and 1e9 means more than that, NaN or Inf."""
    requests: tuple[int, ...]
    """The request of each cell's first row."""
    rows: int
    """Number of live rows of the step."""
    heads: int


@dataclass(frozen=True)
class KeyMap:
    """KV tokens that a wrong row attended to, as position ranges (first, last)."""

    request: int
    row: int
    """Index of the row inside the request."""
    head: int
    length: int
    """Number of KV tokens of the request."""
    used: tuple[tuple[int, int], ...]
    wanted: tuple[tuple[int, int], ...]
    doubled: tuple[tuple[int, int], ...] = ()
    """KV tokens that were counted more than once."""
    not_asked: tuple[tuple[int, int], ...] = ()
    """KV tokens that were not examined, so it is unknown if they had weight."""


MOST_CHARACTERS = {"headline": 600, "reason": 8000}
"""Longest text of a field of a result; other fields have ``MOST_OTHERS``."""


@dataclass(frozen=True)
class Finding:
    """One failed check for a tired reader: the failure, its place, its extent, and the first thing to look at."""

    check: str
    """Id of the check, as for ``attn-testkit explain``."""
    headline: str
    """One complete line: ``request 3 differs from the oracle, 56x over the limit``."""
    where: str = ""
    spread: str = ""
    attended: str = ""
    hint: str = ""
    step: str = ""
    """The step of the case: empty for a single eager step, else for instance ``replay 4 of 6, bucket 4, 3 live``."""
    errors: ErrorMap | None = None
    """Data for a plot, if diagnosis looked at wrong numbers."""
    keys: KeyMap | None = None
    """Data of ``attended`` for a plot."""
    rule: str = field(init=False, compare=False)
    """Id of the rule of the contract that the check tests first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", rule_of(self.check))
        for name, text in vars(self).items():
            if isinstance(text, str):
                object.__setattr__(self, name, readable(text, MOST_CHARACTERS.get(name, MOST_OTHERS)))
