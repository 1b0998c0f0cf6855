"""``Selection``: how many keys each row of a sparse case attends, and how they are given."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["PATTERN", "Selection"]

PATTERN = r"sel(\d+)(slots)?(holes)?(empty)?"
"""The word of a selection in a case id."""


@dataclass(frozen=True)
class Selection:
    """The selection of a case; ``contract/sparse.py`` has the meaning of each field."""

    topk: int
    """Width of ``selected``: most keys of a row."""
    slots: bool = False
    """Indices are slots of the KV pool, not places of the request."""
    holes: bool = False
    """-1 is listed before keys, too."""
    empty_rows: bool = False
    """Some rows select no key."""

    def __str__(self) -> str:
        return f"sel{self.topk}{'slots' * self.slots}{'holes' * self.holes}{'empty' * self.empty_rows}"

    @classmethod
    def read(cls, match: re.Match[str]) -> Selection:
        """The selection that a match of ``PATTERN`` says."""
        return cls(int(match[1]), bool(match[2]), bool(match[3]), bool(match[4]))
