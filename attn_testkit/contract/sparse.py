"""Sparse attention that a backend takes: each row attends to the keys that an indexer selected for it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from .declared import Declared, is_whole, spelled

__all__ = ["INDEX_SPACES", "Sparse"]

INDEX_SPACES = ("positions", "slots")


@dataclass(frozen=True)
class Sparse(Declared):
    """The selections that a backend takes: ``Capabilities(sparse=Sparse(topk={2048}, index_space="positions"))``.

    Every layer of such a backend gets ``selected``, [T, topk] int32 on the device, by name in each ``forward``. The
    keys of a row are listed in any order, each once; -1 means no key. A row of fewer keys than ``topk`` selects all
    that it may see. Layers have selections of their own, and so has each row.

    Raises ``ValueError`` for a wrong spelling, and for no ``topk``.
    """

    topk: Set[int]
    """Widths of ``selected``. It has no default. DeepSeek V3.2 has 2048."""
    index_space: str = "positions"
    """Meaning of an index. ``positions``: a key's place in its request, 0 being the first, which the request
    table maps to a slot. ``slots``: a slot of the KV pool (the fused top-k of SGLang, ``PAGED``)."""
    holes: bool = False
    """True if -1 may come before a key. False: every -1 of a row is after its last key."""
    empty_rows: bool = False
    """True if a live row may select no key; its output must be finite then. False: each selects one or more."""

    any_padding: bool = False
    """True if padded rows may hold any index, even a stale one. False: a padded row holds -1, or the keys
    of a live row."""

    def __post_init__(self) -> None:
        topk = self._listed("topk")
        if not topk or not all(is_whole(each) and each >= 1 for each in topk):
            raise ValueError(f"Sparse.topk must be one or more whole numbers from 1 on, got {sorted(map(str, topk))}")
        self._set("topk", frozenset(topk))
        spelled("index_space", self.index_space, INDEX_SPACES)
        self._check_flags()
