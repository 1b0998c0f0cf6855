"""Class D: contexts that are full up to the last token."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, VerifyInput

from .catalogue import fault
from .parent import Metadata, PlannedBackend

_DRAFTS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)


@fault(
    "vllm-ascend #9098",
    "reads-own-kv matches-oracle",
    "of another owner|page 0",
    modelled="the column that is missing reads as page 0",
)
class PageColumnsRoundedDown(PlannedBackend):
    """The page table has max_context_len // page columns, but a full context with a partly used last page needs one
    more.
    """

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        whole = self.context.max_context_len // self.context.page_size
        return super().plan_pages(batch).masked_fill(self.index[: self.pages] >= whole, 0)


@fault("general", "matches-oracle", "fills the context")
class LastTokenOfContextLeftOut(PlannedBackend):
    """Positions are compared with < max_context_len - 1: the token that fills the context is never attended to."""

    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        key = self.index[: self.pages * self.context.page_size]
        return super().visible(meta, layer, position) & (key < self.context.max_context_len - 1)


class ContextOfPrefixes(PlannedBackend):
    """Healthy parent: tables are as wide as the request table, whatever ``max_context_len`` counts."""

    capabilities = PlannedBackend.capabilities.with_changes(
        eager=_DRAFTS,
        graph=_DRAFTS,
        heads={"families": {"gqa"}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}},
        windows=(),
        options={"logit_cap": False, "sinks": False},
        server={"context_len": {"all", "prefix"}},
    )


@fault(
    "general; tables of context_len columns, where the request table has num_draft_tokens more (sglang)",
    "matches-oracle",
    modes=_DRAFTS,
)
class PageTableWithoutTheDrafts(ContextOfPrefixes):
    """The page table covers max_context_len tokens, so a request with that many gets no page for drafts."""

    def most_keys(self, context: BackendContext) -> int:
        return context.max_context_len

    def plan_pages(self, batch: ForwardBatch) -> torch.Tensor:
        return super().plan_pages(batch)[:, : self.pages]


@fault(
    "general; seq_lens clamped to max_context_len, which does not count drafts", "matches-oracle finite", modes=_DRAFTS
)
class LengthsClampedToTheContext(ContextOfPrefixes):
    """Keys of a request are at most max_context_len, so its drafts at the end of a context see one another's keys."""

    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super().plan_lengths(batch, counts).clamp(max=self.context.max_context_len)


@fault("sglang #29450", "completes captures-cleanly", modes="target-verify", executions="graph")
class TreeMasksWithoutTheDrafts(ContextOfPrefixes):
    """The buffer of tree masks has max_context_len columns, but a row of a mask needs one more for each draft token."""

    cells = 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.cells = max_bs * self.context.num_draft_tokens * self.context.max_context_len

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        spec = batch.spec_info
        mask = spec.custom_mask if isinstance(spec, VerifyInput) else None
        if self.context.topk > 1 and mask is not None and mask.numel() > self.cells:
            raise RuntimeError(f"{mask.numel()} cells of a mask do not fit into a buffer of {self.cells}")
        super().init_forward_metadata_out_graph(batch, in_capture)
