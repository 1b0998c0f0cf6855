"""``torch_native`` as a server that receives requests from prefill servers with other ranks, pages and layouts."""

from __future__ import annotations

from typing_extensions import override

from ..contract import (
    Bounds,
    Capabilities,
    ForwardMode,
    HandOver,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    Promises,
    Receives,
    ServerConventions,
    Windows,
)
from ..contract.hand_over import SENDER_RANKS
from .handed import receive_memory
from .torch_native import TorchNativeBackend

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND})


class TorchNativeHandedBackend(TorchNativeBackend):
    """Receives K and V, and goes on in decode, target-verify and extend."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}),
        heads=HeadShapes(
            families=frozenset({"mha", "gqa", "mqa", "mla"}),
            head_dims=frozenset({64, 512}),
            mla_rope_dims=frozenset({64}),
            gqa_ratios=frozenset({4}),
        ),
        precision=Precision(dtypes=frozenset({"bf16"})),
        kv_pool=KVPools(
            kv_dtypes=frozenset({"same", "fp8_e4m3"}),
            page_sizes=frozenset({4, 16}),
            kv_layouts=frozenset({"nhd", "hnd"}),
            kv_groups=True,
            kv_sharing=True,
        ),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_context_len=1 << 13),
        windows=Windows(_MODES),
        receives=Receives(
            page_sizes=frozenset({1, 8, 64}),
            kv_layouts=frozenset({"nhd", "hnd"}),
            ranks=frozenset(SENDER_RANKS),
            shared_heads=True,
        ),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_requests_without_rows=True),
        promises=Promises(deterministic=True),
    )

    @override
    def receive(self, handed: HandOver) -> None:
        """Copy K and V of the rank's heads."""
        receive_memory(self.context, handed)
