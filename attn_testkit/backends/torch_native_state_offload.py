"""``torch_native_hybrid`` as a server that moves states, windows and keys to the host and back."""

from __future__ import annotations

from typing_extensions import override

from ..contract import HOST_LAYOUTS, Offloads, Transfer
from .offloading import all_to_device, all_to_host
from .torch_native_hybrid import TorchNativeHybridBackend
from .torch_native_state_handed import TorchNativeStateHandedBackend


class TorchNativeStateOffloadBackend(TorchNativeHybridBackend):
    """Copies the windows and states of layers that keep a state, and K and V of the softmax layers between them."""

    capabilities = TorchNativeStateHandedBackend.capabilities.with_changes(
        receives=None,
        offloads=Offloads(host_layouts=frozenset(HOST_LAYOUTS), memory=frozenset({"keys", "states"})),
    )

    @override
    def offload(self, transfer: Transfer) -> None:
        """Copy states, windows and keys to the host, which waits."""
        all_to_host(self.context, transfer)

    @override
    def reload(self, transfer: Transfer) -> None:
        """Copy states, windows and keys to the device on the current stream."""
        all_to_device(self.context, transfer)
