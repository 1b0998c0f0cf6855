"""``Selection``: how many keys each row of a sparse case attends to, and in which form the backend gets them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..contract import Sparse

PATTERN = r"sel(\d+)(?:of(\d+))?(slots|pages)?(perhead)?(holes)?(empty)?(withoutown)?"
"""The word of a selection in a case id."""


@dataclass(frozen=True)
class Selection:
    """The selection of a case; ``contract/sparse.py`` has the meaning of each field."""

    topk: int
    """Width of ``selected``: most keys of a row."""
    space: str = "positions"
    """Meaning of an index: one of ``INDEX_SPACES``."""
    holes: bool = False
    """True if -1 may also come before a key."""
    empty_rows: bool = False
    """True if some rows select no key."""
    block: int = 1
    """Keys of a block; 1 if an index is a key."""
    per_kv_head: bool = False
    """True if each KV head selects for itself."""
    without_own_block: bool = False
    """True if some rows do not list the block that contains them."""

    @classmethod
    def of(cls, sparse: Sparse, topk: int, **flags: bool) -> Selection:
        """A selection in the form that a backend declares. ``flags``: fields in which its cases may differ."""
        return cls(topk, sparse.index_space, block=sparse.block, per_kv_head=sparse.per_kv_head, **flags)

    def __str__(self) -> str:
        blocks = f"of{self.block}" if self.block > 1 else ""
        space = "" if self.space == "positions" else self.space
        flags = "holes" * self.holes + "empty" * self.empty_rows + "withoutown" * self.without_own_block
        return f"sel{self.topk}{blocks}{space}{'perhead' * self.per_kv_head}{flags}"

    @classmethod
    def read(cls, match: re.Match[str]) -> Selection:
        """The selection of a match of ``PATTERN``."""
        per_head, holes, empty, without_own = (bool(match[group]) for group in range(4, 8))
        return cls(
            int(match[1]), match[3] or "positions", holes, empty, int(match[2] or 1), per_head, without_own
        )  # fmt: skip

    @property
    def slots(self) -> bool:
        """True if indices are slots of the KV pool."""
        return self.space == "slots"

    @property
    def keys(self) -> int:
        """Most keys of a row."""
        return self.topk * self.block
