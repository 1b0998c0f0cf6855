"""``torch_native_sparse`` as a server that moves latent rows and index keys to the host and back."""

from __future__ import annotations

from typing_extensions import override

from ..contract import HOST_LAYOUTS, ForwardMode, Indexer, LayerOptions, Offloads, Sparse, Transfer
from .offloading import parts_of, to_device, to_host
from .torch_native_sparse import TorchNativeSparseBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})


class TorchNativeSparseOffloadBackend(TorchNativeSparseBackend):
    """Copies slot by slot: a page of index keys has other tokens than a page of latent rows."""

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
        offloads=Offloads(host_layouts=frozenset(HOST_LAYOUTS), memory=frozenset({"keys", "index_keys"})),
    )

    @override
    def offload(self, transfer: Transfer) -> None:
        """Copy latent rows and index keys to the host, which waits."""
        for part in parts_of(self.context, transfer):
            to_host(part)

    @override
    def reload(self, transfer: Transfer) -> None:
        """Copy latent rows and index keys to the device on the current stream."""
        for part in parts_of(self.context, transfer):
            to_device(part)
