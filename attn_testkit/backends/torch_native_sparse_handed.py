"""``torch_native_sparse`` as a server that receives latent rows and index keys from prefill servers."""

from __future__ import annotations

from typing_extensions import override

from ..contract import ForwardMode, HandOver, Indexer, LayerOptions, Receives, Sparse
from ..contract.hand_over import SENDER_RANKS
from .handed import receive_memory
from .torch_native_sparse import TorchNativeSparseBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})


class TorchNativeSparseHandedBackend(TorchNativeSparseBackend):
    """Receives latent rows, and index keys with their scales: both are the same on all ranks."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        eager=_MODES,
        graph=frozenset({ForwardMode.DECODE}),
        heads={"families": {"mla"}, "head_dims": {512}, "mla_rope_dims": {64}, "gqa_ratios": {1}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {16, 64}},
        options=LayerOptions(),
        lse=None,
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4}, reuses_selections=True)),
        server={"takes_more_rows": False, "takes_column_views": False, "context_len": {"all"}},
        receives=Receives(page_sizes=frozenset({16, 64}), ranks=frozenset(SENDER_RANKS)),
    )

    @override
    def receive(self, handed: HandOver) -> None:
        """Copy latent rows and index keys."""
        receive_memory(self.context, handed)
