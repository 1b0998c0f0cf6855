"""``torch_native_compressor``: layers that compress keys, in plain torch and float32.

The reference of the contract: it runs everywhere, under graphs too.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from ..contract import (
    COMPRESSED_ROPE,
    BackendContext,
    Bounds,
    Capabilities,
    Compressor,
    CompressorBackend,
    CompressorLayer,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    Promises,
)

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


class TorchNativeCompressorBackend(CompressorBackend):
    """C4 and C128 of DeepSeek V4. Decode and verify run under graphs, too."""

    capabilities = Capabilities(
        eager=_MODES,
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=8, max_topk=1),
        heads=HeadShapes(families={"compressor"}, gqa_ratios={1}, head_dims={128, 512}),
        precision=Precision(dtypes={"bf16", "fp16", "fp32"}),
        kv_pool=KVPools(page_sizes={128, 256}),
        compressor=Compressor(ratios={128}, overlapping_ratios={4}),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.compressor is not None
        self.pool, self.rope = context.compressor.pool, context.compressor.rope

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute the request of each row, on the device."""
        bs, rows = batch.batch_size, batch.input_ids.shape[0]
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            ends = batch.extend_seq_lens.long().cumsum(0)
            row = torch.arange(rows, device=ends.device)
            request = torch.searchsorted(ends, row, right=True).clamp(max=bs - 1)
        else:
            request = torch.arange(rows, device=batch.seq_lens.device) // max(1, rows // max(1, bs))
        self.rows = batch.req_pool_indices.long()[request]

    @override
    def compress(
        self, kv: torch.Tensor, score: torch.Tensor, layer: CompressorLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store what each token leaves, then compress the window of every row, and keep those that end a group."""
        slots, positions = batch.out_cache_loc.long(), batch.positions.long()
        self.store(kv, score, layer, slots, positions)
        ends = self.ends(layer, positions)
        rows = torch.where(ends[:, None], self.rows_of(layer, positions, ends), 0.0).to(kv.dtype)
        # Rows that end no group are stored in page 0, since a store has a fixed number of rows.
        target = torch.where(ends, slots // layer.compress_ratio, 0)
        self.put(layer, target, rows)
        return rows

    def put(self, layer: CompressorLayer, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Store compressed rows."""
        self.pool.get_rows(layer.layer_id).index_put_((target,), rows)

    def ends(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        """[T] bool: tokens with which a group is complete."""
        return (positions + 1) % layer.compress_ratio == 0

    def store(
        self,
        kv: torch.Tensor,
        score: torch.Tensor,
        layer: CompressorLayer,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Store the states of new tokens."""
        assert layer.ape is not None
        bias = layer.ape[self.place(layer, positions)]
        states = torch.stack([kv.float(), score.float() + bias], 1)
        self.pool.get_states(layer.layer_id).index_put_((slots,), states)

    def place(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        """Place of a token in its group."""
        return positions % layer.compress_ratio

    def rows_of(self, layer: CompressorLayer, positions: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """[T, D] float32: compressed rows of the windows that end with each token."""
        weights, values = self.window(layer, positions, ends)
        row = (torch.softmax(weights, 1) * values).sum(1)
        return self.rotated(layer, self.normalized(layer, row), positions)

    def window(
        self, layer: CompressorLayer, positions: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, W, D] float32: scores and values of the window of each row. If the window lacks a token, its score is
        -inf and its value 0. In rows that complete no group, both are 0."""
        ratio, count = layer.compress_ratio, layer.compress_ratio * (2 if layer.overlaps else 1)
        place = torch.arange(count, device=positions.device)
        at = positions[:, None] + 1 - count + place
        there = (at >= 0) & ends[:, None]
        slots = self.slots_of(at.clamp(min=0))
        states = self.pool.get_states(layer.layer_id)[torch.where(there, slots, 0)]
        if layer.overlaps:
            earlier, own = torch.tensor_split(states, 2, -1)
            states = torch.where((place < ratio)[:, None, None], earlier, own)
        values, scores = states.unbind(2)
        # A row that ends no group has scores of 0, so that its softmax is a number.
        empty = ~there[..., None]
        lowest = torch.where(ends[:, None, None], -torch.inf, 0.0)
        return torch.where(empty, lowest, scores), torch.where(empty, 0.0, values)

    def slots_of(self, at: torch.Tensor) -> torch.Tensor:
        """[T, W] int64: slots of positions ``at`` of each row's request."""
        table = self.context.req_to_token
        return table[self.rows[:, None], at.clamp(max=table.shape[1] - 1)].long()

    def normalized(self, layer: CompressorLayer, row: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32."""
        assert layer.norm_weight is not None
        return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + layer.norm_eps) * layer.norm_weight

    def rotated(self, layer: CompressorLayer, row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The last numbers of rows rotated, by the position of the first token of their group."""
        cos, sin = self.rope[self.turned_by(layer, positions)].chunk(2, -1)
        kept, tail = row[:, :-COMPRESSED_ROPE], row[:, -COMPRESSED_ROPE:]
        x, y = tail[:, ::2], tail[:, 1::2]
        return torch.cat([kept, torch.stack([x * cos - y * sin, y * cos + x * sin], -1).flatten(1)], 1)

    def turned_by(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        """Position by which a row is rotated."""
        return positions // layer.compress_ratio * layer.compress_ratio
