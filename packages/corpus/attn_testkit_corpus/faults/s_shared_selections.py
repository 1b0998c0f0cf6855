"""Class S: selections that several layers use: of another layer, of another batch, or looked up twice."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, KernelPlan, KVPool

from .catalogue import fault
from .indexer import INDEX_MODES, IndexerParent

_HANDED_ON = "does not hand it on"
_READ_LATER = "only layers that use the selection of a layer before them are wrong"


class SelectionInABuffer(IndexerParent):
    """A right backend in which the layer that selects looks the slots up once, and stores them in a buffer that it and
    the layers after it read (``sparse_kv_indices_buffer`` of ATOM; the ``topk_indices_buffer`` of vLLM has positions).
    """

    capabilities = IndexerParent.capabilities.with_changes(server={"two_batch_overlap": True})

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.buffers: dict[int, list[torch.Tensor]] = {}

    def source(self, layer: AttentionLayer) -> int:
        """Number of the buffer that a layer reads."""
        return 0

    def buffer(self, number: int, rows: int, topk: int) -> torch.Tensor:
        """[rows, topk] int64: the first rows of a buffer. Graphs may use a shorter one, so it is kept, too."""
        found = self.buffers.setdefault(number, [])
        if not found or len(found[-1]) < rows:
            found.append(torch.full((rows, topk), -1, device=self.context.device))
        return found[-1][:rows]

    def stored(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk] int64: what a layer stores in the buffer."""
        return torch.where(selected >= 0, super().slots(selected, plan), -1)

    @override
    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        rows, layer = len(selected), plan.layer
        if not layer.reuses_selection:
            self.buffer(self.source(layer), rows, layer.topk).copy_(self.stored(selected, plan))
        return self.buffer(self.source(layer), rows, layer.topk)

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0)


@fault(
    "sglang #38007 (a layer discards the indices that the next one needs)",
    "matches-oracle",
    _HANDED_ON,
    modes=INDEX_MODES,
    modelled="upstream no layer hands them on under two-batch overlap; here only layers that have them from another",
)
class SharedSelectionIsNotHandedOn(SelectionInABuffer):
    """A layer reads the indices of the layer before it, and stores its own only if it selects."""

    def source(self, layer: AttentionLayer) -> int:
        return layer.layer_id - layer.reuses_selection


_BUFFERS: WeakKeyDictionary[KVPool, dict[int, list[torch.Tensor]]] = WeakKeyDictionary()


@fault(
    "sglang #38007 (each sub-batch needs indices of its own)",
    "matches-oracle finite reads-own-kv",
    "without two-batch overlap",
    modes="decode",
)
class SharedSelectionOfTheOtherBatch(SelectionInABuffer):
    """The buffer belongs to the model, and the second batch of a step stores its selection there before the first one
    runs its next layer."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.buffers = _BUFFERS.setdefault(context.kv_pool, {})


@fault(
    "general; sglang #25276 (indices of another layer are looked up again for each layer)",
    "matches-oracle finite reads-own-kv completes",
    _READ_LATER,
    modes=INDEX_MODES,
)
class SharedSelectionIsLookedUpTwice(SelectionInABuffer):
    """Positions are replaced by slots in place, and the next layer takes the slots for positions."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        positions = self.buffer(0, len(selected), plan.layer.topk)
        if not plan.layer.reuses_selection:
            positions.copy_(selected)
        slots = self.stored(positions.clamp(max=plan.slot_table.shape[1] - 1), plan)
        return positions.copy_(slots)
