"""Class D: contexts that are full to the last token."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import AttentionLayer, ForwardBatch, ForwardMode
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)


@fault(
    slug="page-columns-rounded-down",
    source="vllm-ascend #9098",
    modes=_ALL,
    checks=("reads-own-kv", "matches-oracle"),
    hint="of another owner|page 0",
    modelled="the column that is missing reads as page 0",
)
class PageColumnsRoundedDown(PlannedBackend):
    """The page table has max_context_len // page columns, and a context that is full to its last, partly used page has
    one more.
    """

    @override
    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        whole = self.context.max_context_len // self.context.page_size
        return super().plan_pages(batch).masked_fill(self.index[: self.pages] >= whole, 0)


@fault(
    slug="last-token-of-context-left-out",
    source="general",
    modes=_ALL,
    checks=("matches-oracle",),
    hint="missing",
)
class LastTokenOfContextLeftOut(PlannedBackend):
    """Positions are compared with < max_context_len - 1: the token that fills the context is never attended."""

    @override
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        key = self.index[: self.pages * self.context.page_size]
        return super().visible(meta, layer, position) & (key < self.context.max_context_len - 1)
