"""The parent of faults of sparse attention: gather by row, with a hook for each thing that can go wrong."""

from __future__ import annotations

import torch
from typing_extensions import override

from ..backends.torch_native_sparse import TorchNativeSparseBackend
from ..contract import ForwardMode, KernelPlan, Sparse

__all__ = ["SparseParent", "UnionOfRows"]


_ALL = frozenset(ForwardMode)


class SparseParent(TorchNativeSparseBackend):
    """A right backend with few capabilities: ``prepared`` gives the indices, ``is_key`` says which of them count."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        families={"mqa", "mla"}, gqa_ratios={4, 16}, head_dims={64, 128}, dtypes={"bf16"}, kv_dtypes={"same"},
        page_sizes={16}, sinks=False,
    )  # fmt: skip

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n]: the indices that are gathered."""
        return selected

    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, n] bool: whether an index is a key."""
        return selected >= 0

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        selected = self.prepared(plan.selected, plan)
        slot, there = self.slots(selected, plan), self.is_key(selected, plan)
        return self.attend(q, kv, plan, slot, there)

    def request_of_row(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T] int64: request of each row; the last one for padded rows."""
        row = torch.arange(len(selected), device=selected.device)
        found: torch.Tensor = torch.searchsorted(plan.cu_seqlens_q, row, right=True) - 1
        return found.clamp(max=len(plan.kv_lens) - 1)


class UnionOfRows(SparseParent):
    """Two rows gather the keys of both, and the keys of the other one have the weight 0, as SGLang's ``union=2``."""

    # A padded row of a draft may have the keys of a later forward, which are not stored yet.
    capabilities = SparseParent.capabilities.with_changes(
        eager=_ALL - {ForwardMode.DRAFT_DECODE},
        graph=_ALL - {ForwardMode.DRAFT_DECODE},
        sparse=Sparse(topk={16, 64}, holes=True, empty_rows=True, index_space="slots"),
    )

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return selected.clamp(min=0).long()

    @override
    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        assert plan.selected is not None
        out, row = super().run(q, kv, plan), torch.arange(len(q), device=q.device)
        other = plan.selected[(row ^ 1).clamp(max=len(q) - 1)]
        values = kv[1].flatten(0, 1)[self.slots(other, plan)].masked_fill((other < 0)[..., None, None], 0.0)
        return out + 0.0 * values.sum((1, 2))[:, None]
