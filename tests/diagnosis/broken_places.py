"""Broken backends for hints about places: columns of the output, tiles of keys, and lengths of another forward."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch
from attn_testkit_corpus.faults.dense import DenseBackend
from attn_testkit_corpus.faults.i_addressing import _in_32_bits
from attn_testkit_corpus.faults.multi_step import MultiStepBackend
from attn_testkit_corpus.faults.pool_reads import read_slots


class ColumnsSwizzled(DenseBackend):
    """The epilogue stores groups of 8 columns of a head in exchanged places."""

    @override
    def forward(self, q, k, v, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        shape = out.shape
        parts = out.view(len(q), layer.tp_q_head_num, -1, 2, 8)
        return parts.flip(-2).reshape(shape)


class EndOfATileFromItsStart(DenseBackend):
    """A tile has 48 keys; its last 16 are loaded from the addresses of its first 16."""

    @override
    def key_slots(self, batch: ForwardBatch) -> torch.Tensor:
        key = self.key
        return super().key_slots(batch)[:, torch.where(key % 48 >= 32, key - 32, key)]


class EndOfATileLost(DenseBackend):
    """A tile has 48 keys, of which the last 16 are masked."""

    @override
    def visibility(self, batch: ForwardBatch, counts: torch.Tensor, offset: torch.Tensor):
        position, key_position, visible = super().visibility(batch, counts, offset)
        return position, key_position, visible & (self.key % 48 < 32)


class LengthsOfTheLastForward(MultiStepBackend):
    """One plan for all forwards of a draft, with the lengths of the last."""

    @override
    def branch_lengths(self, batch: ForwardBatch, step: int) -> torch.Tensor:
        return super().branch_lengths(batch, self.forwards - 1)


class EpilogueOfEightRows(DenseBackend):
    """The kernel that graphs use stores eight rows, and repeats them in the rows behind."""

    @override
    def forward(self, q, k, v, layer: AttentionLayer, batch: ForwardBatch, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if torch.cuda.is_current_stream_capturing():
            return out[torch.arange(len(out), device=out.device) % 8]
        return out


class LengthsOfTheCapture(DenseBackend):
    """The graph has no more keys of a request than its batch had at capture."""

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if in_capture:
            self.most = int(batch.seq_lens.max())

    @override
    def kv_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        lens = super().kv_lengths(batch, counts)
        return lens.clamp(max=self.most) if torch.cuda.is_current_stream_capturing() else lens


class ValuesIn32BitsInGraphs(DenseBackend):
    """The kernel of graphs multiplies a slot and the stride of V in 32 bits; weights are right."""

    @override
    def values(self, layer: AttentionLayer) -> torch.Tensor:
        slots = self.slots
        if torch.cuda.is_current_stream_capturing():
            slots = _in_32_bits(slots, self.context)
        return read_slots(self.context.kv_pool.get_value_buffer(layer.layer_id), slots)
