"""``Indexing``: the indexer of a case, and its data."""

from __future__ import annotations

import re
from dataclasses import dataclass

INDEX_DATA = ("", "ties", "gauss")
"""Data of index keys and queries. Empty: whole numbers for which every row has one best selection."""
NEAR = "near"
"""Data of whole numbers, with which the scores of all keys differ by a few percent. Only cases of its own have it."""
PATTERN = r"idx(\d+)(pow2)?(fused)?(neox|interleaved)?(?:(reuse)(\d+)?)?(first)?(ties|gauss|near)?"
"""The word of an indexer in a case id."""
_USUAL_REUSE = 2
"""Layers that use one selection in a case whose word is ``reuse``."""


@dataclass(frozen=True)
class Indexing:
    """The indexer of a case; ``contract/sparse.py`` has the meaning of each field."""

    heads: int
    """Query heads of the indexer."""
    pow2: bool = False
    """Scales of keys are powers of two."""
    fused: bool = False
    """True if ``forward`` selects the keys by itself."""
    reuse: int = 1
    """Layers that use one selection: the one that selects, and those after it. 1: each layer selects."""
    first: bool = False
    """True if only the first forward of a draft-decode selects, and all others use its selection."""
    data: str = ""
    """One of ``INDEX_DATA``, or ``NEAR``."""
    rotates: str = "none"
    """Style in which the backend rotates index queries and keys; ``none``: it does not."""

    @property
    def is_exact(self) -> bool:
        """True if each row has one right selection. ``forward`` gets the backend's selection then; otherwise it gets
        one of the kit, because several selections are right."""
        return not self.data

    def source(self, layer: int) -> int:
        """Layer whose selection the layer of number ``layer`` uses: its own, or one before it."""
        return layer - layer % self.reuse

    @property
    def shared(self) -> bool:
        """True if layers use the selections of others."""
        return self.reuse > 1

    def __str__(self) -> str:
        reuse = "reuse" * self.shared + str(self.reuse) * (self.reuse > _USUAL_REUSE)
        flags = (
            "pow2" * self.pow2
            + "fused" * self.fused
            + self.rotates * (self.rotates != "none")
            + reuse
            + "first" * self.first
        )
        return f"idx{self.heads}{flags}{self.data}"

    @classmethod
    def read(cls, match: re.Match[str]) -> Indexing:
        """The indexer of a match of ``PATTERN``."""
        reuse = int(match[6] or _USUAL_REUSE) if match[5] else 1
        flags = bool(match[2]), bool(match[3])
        return cls(int(match[1]), *flags, reuse, bool(match[7]), match[8] or "", match[4] or "none")
