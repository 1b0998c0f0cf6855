"""Class H: one key or page of a long row at the edge of a split, which has too little weight in ordinary data."""

from __future__ import annotations

import torch

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_LONG = 1024
"""Number of keys above which the bug shows; shorter requests are right."""


def _at_edge(backend: PlannedBackend, meta: Metadata) -> torch.Tensor:
    """[B, C] bool: the first key of the second split, only for long requests."""
    key = backend.index[: backend.pages * backend.context.page_size]
    return (key == meta.chunk[:, None]) & (meta.kv_lens[:, None] > _LONG)


@fault("general; splits begin after their edge", "keys-counted-once replay-follows-batch", r"KV token \d+ was left out")
class FirstKeyOfASplitInNone(PlannedBackend):
    """The second split of a long request begins one key late, and the first split does not include that key."""

    capabilities = LEAN

    def in_split(self, meta: Metadata) -> torch.Tensor:
        return super().in_split(meta) & ~_at_edge(self, meta)[:, None]


@fault(
    "general; splits that end after their edge",
    "keys-counted-once replay-follows-batch",
    r"KV token \d+ was counted twice",
)
class FirstKeyOfASplitInTwo(PlannedBackend):
    """The first split of a long request ends one key late, so both splits include that key."""

    capabilities = LEAN

    def in_split(self, meta: Metadata) -> torch.Tensor:
        first = self.index[: self.max_splits, None] == 0
        return super().in_split(meta) | (_at_edge(self, meta)[:, None] & first)


@fault(
    "general; a page looked up one row of the table too far",
    "keys-counted-once matches-oracle reads-own-kv replay-follows-batch",
    r"of request \d+ were read instead of",
)
class SplitBeginsWithANeighboursPage(PlannedBackend):
    """The page at the edge of a long request's second split is looked up in the next request's row of the table, if
    that has whole pages.
    """

    capabilities = LEAN

    def key_slots(self, meta: Metadata) -> torch.Tensor:
        slots, page = super().key_slots(meta), self.context.page_size
        key = self.index[: slots.shape[1]]
        co_resident, lens = slots.roll(-1, 0), meta.kv_lens.roll(-1, 0)
        instead = (key // page == (meta.chunk // page)[:, None]) & (meta.kv_lens[:, None] > _LONG)
        instead &= (lens >= page)[:, None]
        return torch.where(instead, co_resident.gather(1, (key % page).expand_as(slots)), slots)
