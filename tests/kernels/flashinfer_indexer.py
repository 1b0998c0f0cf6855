"""FlashInfer's top-k of indexer scores, which also looks up slots. SM80 and later; nothing emulates it.

torch computes the scores, because the kernels that do it are DeepGEMM's.
"""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.contract import ForwardMode, Indexer, KernelPlan, Requires, Sparse

__all__ = ["PageTableTransform", "PageTableTransformPages", "RaggedTransform"]

_MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class PageTableTransform(TorchNativeSparseBackend):
    """``top_k_page_table_transform`` with a table of slots."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        eager=_MODES, graph=_MODES, heads={"families": {"mqa", "mla"}}, precision={"dtypes": {"bf16"}}, sparse=Sparse(
            topk={16, 64, 2048}, index_space="slots", any_padding=True,
            indexer=Indexer(heads={4, 64}, reuses_selections=True),
        ), promises={"deterministic": False}, requires=Requires(packages=("flashinfer-python",), sm=(80, 120)),
    )  # fmt: skip

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Return the selection, which lists slots already."""
        return selected.clamp(min=0).long()

    def run_select(self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Score with torch, and select with FlashInfer."""
        scores, lengths = self.scored(q_index, weights, plan)
        # The last request's count goes on in rows of padding, beyond the scores: the kernels would read there.
        lengths = lengths.clamp(min=0, max=scores.shape[1]).to(torch.int32)
        return self.best(scores, lengths, self.request_of_row(q_index, plan), plan)

    def best(
        self, scores: torch.Tensor, lengths: torch.Tensor, request: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        """[T, topk] int32: slots of the best keys. ``scores`` [T, keys], ``lengths`` [T], ``request`` [T]."""
        from flashinfer import top_k_page_table_transform

        found: torch.Tensor = top_k_page_table_transform(
            scores, plan.slot_table.contiguous(), lengths, plan.layer.topk, row_to_batch=request.to(torch.int32),
            dsa_graph_safe=True,
        )  # fmt: skip
        return found


class PageTableTransformPages(PageTableTransform):
    """The same with a table of pages."""

    capabilities = PageTableTransform.capabilities.with_changes(kv_pool={"page_sizes": {16, 64}})

    def best(
        self, scores: torch.Tensor, lengths: torch.Tensor, request: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        """[T, topk] int32: slots of the best keys."""
        from flashinfer import top_k_page_table_transform

        found: torch.Tensor = top_k_page_table_transform(
            scores, plan.page_table.contiguous(), lengths, plan.layer.topk, row_to_batch=request.to(torch.int32),
            page_size=self.context.page_size, dsa_graph_safe=True,
        )  # fmt: skip
        return found


class RaggedTransform(PageTableTransform):
    """``top_k_ragged_transform`` with offsets of 0: selections are positions."""

    capabilities = PageTableTransform.capabilities.with_changes(
        sparse=Sparse(topk={16, 64, 2048}, any_padding=True, indexer=Indexer(heads={4, 64}))
    )

    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """Slots of the positions."""
        return TorchNativeSparseBackend.slots(self, selected, plan)

    def best(
        self, scores: torch.Tensor, lengths: torch.Tensor, request: torch.Tensor, plan: KernelPlan
    ) -> torch.Tensor:
        """[T, topk] int32: positions of the best keys."""
        from flashinfer import top_k_ragged_transform

        found: torch.Tensor = top_k_ragged_transform(
            scores, torch.zeros_like(lengths), lengths, plan.layer.topk, dsa_graph_safe=True
        )
        return found
