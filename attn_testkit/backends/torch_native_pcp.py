"""``torch_native`` as one of R ranks of prefill context parallelism: the reference for rows that are dealt.

Keys, slots and lengths are those of the whole request. Only the rows are the rank's, and their positions follow from
the batch instead of their order.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import (
    ROW_ORDERS,
    AttentionLayer,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    LayerOptions,
    Needs,
    Precision,
    PrefillRanks,
    Promises,
    ServerConventions,
    Windows,
)
from .torch_native import TorchNativeBackend

_EXTEND = frozenset({ForwardMode.EXTEND})


class TorchNativePcpBackend(TorchNativeBackend):
    """Stores the keys and values of all rows, and computes the outputs of its own rows."""

    capabilities = Capabilities(
        eager=_EXTEND,
        heads=HeadShapes(
            families=frozenset({"gqa", "mla"}),
            head_dims=frozenset({64, 512}),
            mla_rope_dims=frozenset({64}),
            gqa_ratios=frozenset({3, 4}),
        ),
        precision=Precision(dtypes=frozenset({"bf16"})),
        kv_pool=KVPools(kv_dtypes=frozenset({"same", "fp8_e4m3"}), page_sizes=frozenset({1, 4, 16})),
        bounds=Bounds(max_context_len=1 << 13),
        windows=Windows(_EXTEND, chunked=_EXTEND),
        options=LayerOptions(logit_cap=True, alibi=_EXTEND, sinks=True),
        prefill_ranks=PrefillRanks(frozenset(ROW_ORDERS)),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_requests_without_rows=True),
        promises=Promises(deterministic=True),
    )

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Plan the rows of the rank; a rank without rows has nothing to plan."""
        if len(batch.input_ids):
            super().init_forward_metadata_in_graph(batch)

    @override
    def _visibility(
        self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, W] position of each row, [B, 1, C] of each key, [B, W, C] True if the row may see it."""
        key, held = self._key[None, None], self._key < batch.seq_lens[: batch.batch_size, None]
        position = batch.positions[self._row]
        return position, key, (key <= position[..., None]) & held[:, None]

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of the rows of the rank, [T_r, Hq, Dv]."""
        if len(q):
            return super().forward(q, k, v, layer, batch, save_kv_cache, out=out)
        self._store(k, v, layer, batch, save_kv_cache)
        return q.new_empty(0, layer.tp_q_head_num, layer.v_head_dim)
