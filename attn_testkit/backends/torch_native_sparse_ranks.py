"""``torch_native_sparse`` as one of R ranks of decode context parallelism: the reference for selected keys on ranks.

A selection names positions in the request, and is the same on all ranks. A rank attends to the selected keys that it
has, at their local indices. Each rank has the index keys of all tokens, and selects for itself.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import ForwardMode, Indexer, KernelPlan, LogSumExp, Sparse
from .torch_native_sparse import TorchNativeSparseBackend

_MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class TorchNativeSparseRanksBackend(TorchNativeSparseBackend):
    """Gathers the selected keys of its rank; stores the new rows of its rank."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        eager=_MODES,
        graph=_MODES,
        heads={"families": {"gqa", "mla"}, "head_dims": {64, 512}, "mla_rope_dims": {64}, "gqa_ratios": {3, 4, 16}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {1, 4, 16}},
        sparse=Sparse(
            topk={1, 16},
            holes=True,
            empty_rows=True,
            fewer_rows=True,
            any_padding=True,
            indexer=Indexer(heads={4}, reuses_selections=True, replicated=True),
        ),
        bounds={"max_q_rows": 8, "max_draft_branches": 1, "max_context_len": 1 << 13},
        server={"context_len": {"all"}},
        lse=LogSumExp(base="e", ranks=_MODES),
    )

    @override
    def slots(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk] int64: the slot of each selected key of the rank, in its pool; any slot for others."""
        if not plan.part.own_pool:
            return super().slots(selected, plan)
        return super().slots(plan.part.index(selected.clamp(min=0)), plan)

    @override
    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        """[T, topk] bool: True for the selected keys of the rank."""
        found = super().is_key(selected, plan)
        return found & plan.part.holds(selected, torch.zeros_like(selected)) if plan.part.own_pool else found
