"""Class S: indexers of a draft: selections of its first forward that later ones use, and indexers of later forwards."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, Indexer, KernelPlan, Sparse

from .catalogue import fault
from .s_shared_selections import SelectionInABuffer

_ONLY_LATER = "only later forwards"
_DRAFT = "draft-decode"
_OTHER = 64
"""Number of the second buffer of layer 0; layers have smaller ids."""


class DraftIndexer(SelectionInABuffer):
    """A right backend whose drafts select in each forward, or only in the first. Later forwards read the slots of the
    first one from a buffer of their layer, as in vLLM and ATOM."""

    capabilities = SelectionInABuffer.capabilities.with_changes(
        eager={_DRAFT},
        graph={_DRAFT},
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4}, drafts={"each", "first"})),
        server={"two_batch_overlap": False},
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.selected: set[int] = set()

    @override
    def source(self, layer: AttentionLayer) -> int:
        return layer.layer_id

    @override
    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        self.selected.add(plan.layer.layer_id)
        return super().run_select(q_index, weights, plan)

    @override
    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        layer = plan.layer
        rows = self.buffer(self.source(layer), len(selected), layer.topk)
        if layer.index_heads and layer.layer_id not in self.selected:
            return self.later(rows, plan)
        self.selected.discard(layer.layer_id)
        slots = self.stored(selected, plan)
        return self.keep(rows, slots, layer) if layer.index_heads else slots

    def keep(self, rows: torch.Tensor, slots: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Store ``slots`` [T, topk], which a forward selected, in ``rows`` [T, topk] of a buffer, and return these."""
        return rows.copy_(slots)

    def later(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk]: slots to which a later forward attends. ``rows`` [T, topk]: those of the first one."""
        return rows


@fault(
    "vLLM #47238; TensorRT-LLM #15806",
    "matches-oracle finite reads-own-kv",
    _ONLY_LATER,
    modes=_DRAFT,
    modelled="upstream the first forward has a row per accepted token; here the buffer has two rows per request",
)
class DraftSelectionIsNotCompacted(DraftIndexer):
    """The buffer of the first forward has several rows per request, and later forwards read its first rows."""

    def later(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return rows.repeat_interleave(2, 0)[: len(rows)]


@fault("vLLM #48528", "matches-oracle", _ONLY_LATER, modes=_DRAFT)
class DraftSelectionIsCleared(DraftIndexer):
    """Each forward clears the buffer of selections before it finds that it has nothing to select."""

    def later(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return rows.fill_(-1)


@fault(
    "ROCm/ATOM #1362",
    "matches-oracle finite reads-own-kv steps-independent replay-follows-batch",
    modes=_DRAFT,
    modelled="upstream a draft attends to what its target selected; here to what the draft before it selected",
)
class DraftSelectionOfTheDraftBefore(DraftIndexer):
    """Drafts never store their own selection, and attend to an older one."""

    def keep(self, rows: torch.Tensor, slots: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        newer = self.buffer(layer.layer_id + _OTHER, *slots.shape)
        rows.copy_(newer)
        newer.copy_(slots)
        return rows


@fault(
    "vLLM #41162",
    "selection-well-formed selects-best",
    "planned once per draft",
    modes=_DRAFT,
    modelled="upstream all metadata of a draft's first forward are kept; here only the lengths of the indexer",
)
class DraftIndexerOfTheFirstLengths(DraftIndexer):
    """Lengths of the indexer are planned once per draft, so tokens of the draft after its first are not scored."""

    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        assert plan.step.draft is not None
        return super().lengths(rows, plan) - plan.step.draft.step


@fault(
    "sglang #24750",
    "index-stored",
    modes=_DRAFT,
    modelled="upstream K and V are written there, too; here only index keys",
)
class DraftIndexKeysInSlotsOfAllForwards(DraftIndexer):
    """Slots of a forward are the first ones of the whole draft, which are by request, and not those of the forward."""

    def pool_slots(self, plan: KernelPlan) -> torch.Tensor:
        assert plan.step.draft is not None
        slots = plan.step.draft.out_cache_loc
        return slots[: len(plan.out_cache_loc)].long()
