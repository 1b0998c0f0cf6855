"""``torch_native_hybrid`` as a server that moves states, windows and keys to the host and back."""

from __future__ import annotations

from typing_extensions import override

from ..contract import HOST_LAYOUTS, ForwardMode, Offloads, State, Transfer
from .offloading import parts_of, to_device, to_host
from .torch_native_hybrid import TorchNativeHybridBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


class TorchNativeStateOffloadBackend(TorchNativeHybridBackend):
    """Copies the windows and states of layers that keep a state, and K and V of the softmax layers between them."""

    capabilities = TorchNativeHybridBackend.capabilities.with_changes(
        eager=_MODES,
        graph=frozenset({ForwardMode.DECODE}),
        heads={"head_dims": {32}, "gqa_ratios": {1, 2}},
        precision={"dtypes": {"bf16"}},
        bounds={"max_topk": 1},
        state=State(
            k_dims={32}, conv_widths={1, 2, 4}, dtypes={"fp32", "bf16"}, orders={"vk", "kv"}, strided=True, hybrid=True
        ),
        offloads=Offloads(host_layouts=frozenset(HOST_LAYOUTS), memory=frozenset({"keys", "states"})),
    )

    @override
    def offload(self, transfer: Transfer) -> None:
        """Copy states, windows and keys to the host, which waits."""
        for part in parts_of(self.context, transfer):
            to_host(part)

    @override
    def reload(self, transfer: Transfer) -> None:
        """Copy states, windows and keys to the device on the current stream."""
        for part in parts_of(self.context, transfer):
            to_device(part)
