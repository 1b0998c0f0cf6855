"""``Indexing``: the indexer of a case, and its data."""

from __future__ import annotations

import re
from dataclasses import dataclass

INDEX_DATA = ("", "ties", "gauss")
"""Data of index keys and queries. Empty: whole numbers for which every row has one best selection."""
NEAR = "near"
"""Data of whole numbers, with which the scores of all keys differ by a few percent. Only cases of its own have it."""
PATTERN = r"idx(\d+)(pow2)?(fused)?(reuse)?(ties|gauss|near)?"
"""The word of an indexer in a case id."""


@dataclass(frozen=True)
class Indexing:
    """The indexer of a case; ``contract/sparse.py`` has the meaning of each field."""

    heads: int
    """Query heads of the indexer."""
    pow2: bool = False
    """Scales of keys are powers of two."""
    fused: bool = False
    """True if ``forward`` selects the keys by itself."""
    reuse: bool = False
    """Every second layer uses the selection of the layer before it."""
    data: str = ""
    """One of ``INDEX_DATA``, or ``NEAR``."""

    @property
    def is_exact(self) -> bool:
        """True if each row has one right selection. ``forward`` gets the backend's selection then; otherwise it gets
        one of the kit, because several selections are right."""
        return not self.data

    def source(self, layer: int) -> int:
        """Layer whose selection the layer of number ``layer`` uses: its own, or the one before it."""
        return layer - layer % 2 if self.reuse else layer

    def __str__(self) -> str:
        flags = "pow2" * self.pow2 + "fused" * self.fused + "reuse" * self.reuse
        return f"idx{self.heads}{flags}{self.data}"

    @classmethod
    def read(cls, match: re.Match[str]) -> Indexing:
        """The indexer of a match of ``PATTERN``."""
        return cls(int(match[1]), bool(match[2]), bool(match[3]), bool(match[4]), match[5] or "")
