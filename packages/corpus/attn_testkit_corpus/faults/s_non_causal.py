"""Class S: selections in layers that are not causal, whose rows may select later rows of their draft block."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import ForwardMode, Indexer, KernelPlan, Sparse

from .catalogue import fault
from .indexer import IndexerParent

_MODES = frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
_IN_WORDS = "extend target-verify"


class NonCausalIndexer(IndexerParent):
    """Healthy parent: a row of a layer that is not causal selects from all keys of its request."""

    capabilities = IndexerParent.capabilities.with_changes(
        eager=_MODES,
        graph=_MODES,
        options={"non_causal": _MODES},
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4})),
    )

    @override
    def keys_seen(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        causal = super().keys_seen(rows, plan)
        return causal if plan.layer.causal else plan.kv_lens[self.request_of_row(rows, plan)]


@fault("general; sparse kernels that mask what an indexer selected", "matches-oracle", "after its own", modes=_IN_WORDS)
class SelectedLaterKeysMasked(NonCausalIndexer):
    """The attention kernel masks selected keys after a row's own, whatever the layer says."""

    @override
    def is_key(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        own = IndexerParent.keys_seen(self, selected, plan)
        return super().is_key(selected, plan) & (selected < own[:, None])


@fault("general; indexers of DeepSeek V3.2 are causal", "selection-well-formed selects-best", "keys", modes=_IN_WORDS)
class IndexerOfNonCausalLayerIsCausal(NonCausalIndexer):
    """Attention is not causal, but the indexer scores only the keys up to the row's own."""

    @override
    def lengths(self, rows: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        return IndexerParent.keys_seen(self, rows, plan)
