"""``Selection``: how many keys each row of a sparse case attends to, and in which form the backend gets them."""

from __future__ import annotations

import re
from dataclasses import dataclass

PATTERN = r"sel(\d+)(?:of(\d+))?(slots)?(holes)?(empty)?"
"""The word of a selection in a case id."""


@dataclass(frozen=True)
class Selection:
    """The selection of a case; ``contract/sparse.py`` has the meaning of each field."""

    topk: int
    """Width of ``selected``: most keys of a row."""
    slots: bool = False
    """True if indices are slots of the KV pool, not positions in the request."""
    holes: bool = False
    """True if -1 may also come before a key."""
    empty_rows: bool = False
    """True if some rows select no key."""
    block: int = 1
    """Keys of a block; 1 if an index is a key."""

    def __str__(self) -> str:
        blocks = f"of{self.block}" if self.block > 1 else ""
        return f"sel{self.topk}{blocks}{'slots' * self.slots}{'holes' * self.holes}{'empty' * self.empty_rows}"

    @classmethod
    def read(cls, match: re.Match[str]) -> Selection:
        """The selection of a match of ``PATTERN``."""
        return cls(int(match[1]), bool(match[3]), bool(match[4]), bool(match[5]), int(match[2] or 1))

    @property
    def keys(self) -> int:
        """Most keys of a row."""
        return self.topk * self.block
