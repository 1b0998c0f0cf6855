"""Class D: prefixes in pages that several requests share, and contexts that are full to the last token."""

from __future__ import annotations

import torch

from ..contract import AttentionLayer, ForwardBatch, ForwardMode
from .builds import CascadeBackend
from .catalogue import fault
from .parent import Metadata, PlannedBackend

_ALL = tuple(ForwardMode)


@fault(
    slug="shared-prefix-without-window",
    bug_class="F",
    source="vLLM #11635, #55227",
    modes=_ALL,
    mechanism="the prefix that all requests share is attended once for all of them, and the window is not passed on",
    checks=("matches-oracle",),
    hint="KV tokens before the window are visible",
)
class SharedPrefixWithoutWindow(CascadeBackend):
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        return super().visible(meta, layer, position) | (
            self.index[: self.pages * self.context.page_size] < self.common
        )


@fault(
    slug="shared-prefix-lse-transposed",
    bug_class="H",
    source="vLLM #22003",
    modes=_ALL,
    mechanism="the shared part's log-sum-exps lie head by head, and the merge reads them row by row",
    checks=("matches-oracle",),
)
class SharedPrefixLseTransposed(CascadeBackend):
    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        part = lse[:, 0].flatten(0, 1)
        lse = lse.clone()
        lse[:, 0] = torch.where(self.common > 0, part.t().reshape(part.shape), part).view_as(lse[:, 0])
        return super().combine(acc, lse, layer)


@fault(
    slug="page-columns-rounded-down",
    bug_class="D",
    source="vllm-ascend #9098",
    modes=_ALL,
    mechanism="the page table has max_context_len // page columns, and a context that is full to its last, partly used "
    "page has one more",
    checks=("reads-own-kv", "matches-oracle"),
    hint="not its own|page 0",
    modelled="the column that is missing reads as page 0",
)
class PageColumnsRoundedDown(PlannedBackend):
    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        whole = self.context.max_context_len // self.context.page_size
        return super().plan_pages(batch).masked_fill(self.index[: self.pages] >= whole, 0)


@fault(
    slug="last-token-of-context-left-out",
    bug_class="D",
    source="general",
    modes=_ALL,
    mechanism="positions are compared with < max_context_len - 1: the token that fills the context is never attended",
    checks=("matches-oracle",),
    hint="missing",
)
class LastTokenOfContextLeftOut(PlannedBackend):
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        key = self.index[: self.pages * self.context.page_size]
        return super().visible(meta, layer, position) & (key < self.context.max_context_len - 1)
