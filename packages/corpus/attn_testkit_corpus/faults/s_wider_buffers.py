"""Class S, rows of wider buffers: tensors of an indexer whose rows are read as if nothing were between them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_testkit.contract import KernelPlan

from .catalogue import fault
from .indexer import IndexerParent
from .sparse import SparseParent


def as_contiguous(rows: torch.Tensor) -> torch.Tensor:
    """Elements that a kernel reads if it finds a row by its number times the number of columns."""
    stride = [math.prod(rows.shape[place + 1 :]) for place in range(rows.dim())]
    return rows.as_strided(rows.shape, stride, rows.storage_offset())


class SparseOfViews(SparseParent):
    """The parent on rows of selected keys that are columns of a wider buffer."""

    capabilities = SparseParent.capabilities.with_changes(server={"takes_column_views": True})


class IndexerOfViews(IndexerParent):
    """The parent on weights of an indexer that are columns of a wider buffer."""

    capabilities = IndexerParent.capabilities.with_changes(server={"takes_column_views": True})


@fault("general (row * topk as the place of a row)", "matches-oracle reads-own-kv finite", modes="decode extend")
class StrideOfSelectionsIsTopk(SparseOfViews):
    """A row of selected keys is found by its number times top-k, and not by the stride of the tensor."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        return super().run(q, kv, replace(plan, selected=as_contiguous(plan.selected)))


@fault("general (row * heads as the place of a row)", "selects-best matches-oracle finite", modes="decode extend")
class StrideOfWeightsIsTheNumberOfHeads(IndexerOfViews):
    """A row of an indexer's weights is found by its number times the number of heads."""

    def scored(self, q: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return super().scored(q, as_contiguous(weights), plan)
