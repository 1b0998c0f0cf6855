"""Sparse attention that a backend takes: each row attends the keys that an indexer selected for it."""

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
    """Which widths of ``selected``? It has no default. DeepSeek V3.2 has 2048."""
    index_space: str = "positions"
    """What is an index? Default, ``positions``: a key's place in its request, 0 being the first, which the request
    table maps to a slot. ``slots``: a slot of the KV pool (the fused top-k of SGLang, ``PAGED``)."""
    block: int = 1
    """How many keys does an index select? Default, 1: the key itself. B: keys ``B * i .. B * i + B - 1`` of the request
    (NSA, MoBA, quest), of which a row attends those that it may see. ``topk`` then counts blocks, and a row always
    lists the block of its own key, which may be cut off behind it. All heads of a row have one selection."""
    holes: bool = False
    """May -1 come before a key, too? Default: every -1 of a row is behind its last key."""
    empty_rows: bool = False
    """May a row of a live request select no key? Its output must be finite then. Default: each selects one or more."""
    fewer_rows: bool = False
    """May ``selected`` have fewer rows than ``q``? Rows of ``q`` behind it belong to no request: the layers around
    attention were padded, and the indexer was not (``ServerConventions.takes_more_rows``). Their output must be finite.
    Default: it has one row for each of ``q``."""
    any_padding: bool = False
    """May padded rows hold any index, stale ones of earlier requests too? Default: a padded row holds -1, or the keys
    of a live row."""

    def __post_init__(self) -> None:
        topk = self._listed("topk")
        if not topk or not all(is_whole(each) and each >= 1 for each in topk):
            raise ValueError(f"Sparse.topk must be one or more whole numbers from 1 on, got {sorted(map(str, topk))}")
        self._set("topk", frozenset(topk))
        spelled("index_space", self.index_space, INDEX_SPACES)
        if not is_whole(self.block) or self.block < 1:
            raise ValueError(f"Sparse.block must be a whole number from 1 on, got {self.block!r}")
        if self.block > 1 and (self.index_space != "positions" or self.empty_rows):
            raise ValueError(
                "Sparse.block above 1 goes with index_space='positions' and without empty_rows: an index is a block of "
                "a request, and each row lists that of its own key"
            )
        self._check_flags()
