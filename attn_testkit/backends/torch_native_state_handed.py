"""``torch_native_hybrid`` as a server that receives states, windows and keys from prefill servers with other ranks."""

from __future__ import annotations

from typing_extensions import override

from ..contract import ForwardMode, HandOver, Receives, State
from ..contract.hand_over import SENDER_RANKS
from .handed import receive_memory
from .torch_native_hybrid import TorchNativeHybridBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


class TorchNativeStateHandedBackend(TorchNativeHybridBackend):
    """Receives the windows and states of layers that keep a state, and K and V of the softmax layers between them."""

    capabilities = TorchNativeHybridBackend.capabilities.with_changes(
        eager=_MODES,
        graph=frozenset({ForwardMode.DECODE}),
        heads={"head_dims": {32}, "gqa_ratios": {1, 2}},
        precision={"dtypes": {"bf16"}},
        bounds={"max_topk": 1},
        state=State(
            k_dims={32}, conv_widths={1, 2, 4}, dtypes={"fp32", "bf16"}, orders={"vk", "kv"}, strided=True, hybrid=True
        ),
        receives=Receives(
            page_sizes=frozenset({4, 16}), kv_layouts={"nhd", "hnd"}, ranks=frozenset(SENDER_RANKS), shared_heads=True
        ),
    )

    @override
    def receive(self, handed: HandOver) -> None:
        """Copy windows part by part, states and keys of the rank's heads."""
        receive_memory(self.context, handed)
