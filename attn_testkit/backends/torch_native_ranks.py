"""``torch_native`` as one of R ranks of decode context parallelism: the reference for ranks with pools of their own.

All masks stay those of the whole request, over its global keys. Only two things are the rank's: the keys that it has,
and the slots in which they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from ..contract import (
    AttentionLayer,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    LayerOptions,
    LogSumExp,
    Precision,
    Promises,
    ServerConventions,
    Windows,
)
from .torch_native import TorchNativeBackend, _Seen

_MODES = frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE}


class TorchNativeRanksBackend(TorchNativeBackend):
    """Attends to the keys of its rank; stores the new rows of its rank."""

    capabilities = Capabilities(
        eager=_MODES,
        graph=_MODES,
        heads=HeadShapes(
            families=frozenset({"gqa", "mla"}),
            head_dims=frozenset({64, 512}),
            mla_rope_dims=frozenset({64}),
            gqa_ratios=frozenset({3, 4}),
        ),
        precision=Precision(dtypes=frozenset({"bf16"})),
        kv_pool=KVPools(kv_dtypes=frozenset({"same", "fp8_e4m3"}), page_sizes=frozenset({1, 4, 16})),
        bounds=Bounds(max_q_rows=8, max_topk=2, max_context_len=1 << 13),
        windows=Windows(_MODES),
        options=LayerOptions(sinks=True),
        server=ServerConventions(
            takes_more_rows=True,
            padded_requests=frozenset({"rows", "nothing"}),
            padding_slots=frozenset({0, -1}),
            verify_lens=frozenset({"prefix", "all"}),
        ),
        promises=Promises(deterministic=True),
        lse=LogSumExp(base="e", ranks=_MODES, merges=True),
    )

    @override
    def _key_slots(self, batch: ForwardBatch, group: int, of_encoder: bool) -> torch.Tensor:
        """[B, C] int64: slot of each global key in the pool of the rank, and slot 0 for keys of other ranks."""
        table = super()._key_slots(batch, group, of_encoder)
        if not self.context.kv_splits:
            return table
        own = self.context.kv_splits[0]
        assert batch.dcp_local_seq_lens is not None
        index = own.index(self._key).expand(len(table), -1)
        lens = batch.dcp_local_seq_lens[: batch.batch_size, None]
        held = own.holds(self._key, torch.zeros_like(self._key)) & (index < lens)
        return table.gather(1, index).masked_fill(~held, 0)

    @override
    def _values(self, layer: AttentionLayer, seen: _Seen) -> torch.Tensor:
        """[B, Hk, C, Dv] float32, zeros for keys that no row sees: the last key of a request may be on another rank."""
        unseen = seen.hidden.all(3).view(len(seen.hidden), 1, -1, 1)
        return super()._values(layer, seen).masked_fill(unseen, 0.0)

    @override
    def _seen_by(self, seen: torch.Tensor, layer: AttentionLayer) -> _Seen:
        """Masks and values that follow from ``seen`` [B, W, C]."""
        found = super()._seen_by(seen, layer)
        return replace(found, values=self._keys_at[self._keys_of(layer)]) if self.context.kv_splits else found
