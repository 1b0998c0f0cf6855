"""The contract of a backend whose layers compress keys."""

from __future__ import annotations

from abc import abstractmethod

import torch
from typing_extensions import override

from .backend import AttentionBackend
from .batch import ForwardBatch
from .compressor_layer import CompressorLayer

__all__ = ["CompressorBackend"]


class CompressorBackend(AttentionBackend):
    """One backend of layers that compress keys: planned, captured and replayed as an attention backend is.

    ``context.compressor`` has the layers, the pool and the rotations; the KV pool has no layers. Declare
    ``Capabilities.compressor``.
    """

    @override
    def forward(  # type: ignore[override]  # the activations of such a layer are others
        self, kv: torch.Tensor, score: torch.Tensor, _: None, layer: CompressorLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Call ``compress``."""
        return self.compress(kv, score, layer, batch)

    @abstractmethod
    def compress(
        self, kv: torch.Tensor, score: torch.Tensor, layer: CompressorLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store the states of new tokens and the rows of groups that they complete. Returns these rows.

        ``kv`` and ``score`` [T, c * D] in the model's dtype, possibly strided views of one packed tensor; neither may
        be modified. A token's state goes to slot ``batch.out_cache_loc``: ``kv`` and ``score + ape``, each rounded
        once to float32. If the token is the last of its group, at a position p with (p + 1) % r == 0, the compressed
        row goes to row ``out_cache_loc // r``. No other row changes, those of groups that are not complete included.

        States of earlier tokens are found by ``req_to_token``. Only those of windows that the new tokens complete, or
        that later tokens will, hold numbers; all other memory holds NaN, compressed rows of earlier groups included.
        Rows of padded requests may hold anything, and may write page 0.

        Returns [T, D] or [T, 1, D] in the model's dtype: the compressed row of a token that completes its group, and
        finite numbers of other tokens. In a row format it is the row before it is packed, or what the pool holds.
        """
