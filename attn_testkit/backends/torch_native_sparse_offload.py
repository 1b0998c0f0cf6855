"""``torch_native_sparse`` as a server that moves latent rows and index keys to the host and back."""

from __future__ import annotations

from typing_extensions import override

from ..contract import HOST_LAYOUTS, Offloads, Transfer
from .offloading import all_to_device, all_to_host
from .torch_native_sparse import TorchNativeSparseBackend
from .torch_native_sparse_handed import TorchNativeSparseHandedBackend


class TorchNativeSparseOffloadBackend(TorchNativeSparseBackend):
    """Copies slot by slot: a page of index keys has other tokens than a page of latent rows."""

    capabilities = TorchNativeSparseHandedBackend.capabilities.with_changes(
        receives=None,
        offloads=Offloads(host_layouts=frozenset(HOST_LAYOUTS), memory=frozenset({"keys", "index_keys"})),
    )

    @override
    def offload(self, transfer: Transfer) -> None:
        """Copy latent rows and index keys to the host, which waits."""
        all_to_host(self.context, transfer)

    @override
    def reload(self, transfer: Transfer) -> None:
        """Copy latent rows and index keys to the device on the current stream."""
        all_to_device(self.context, transfer)
