"""The parent of faults of layers that compress keys: group by group, with a hook for each step that can go wrong."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import (
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
_TURNED = 64


class CompressorParent(CompressorBackend):
    """A right backend of groups of 4 tokens that overlap, and of 16 that do not.

    It shares no code with the adapter: otherwise a mistake there would be in every seeded bug.
    """

    capabilities = Capabilities(
        eager=_MODES,
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=6, max_topk=1),
        heads=HeadShapes(families={"compressor"}, gqa_ratios={1}, head_dims={128}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={64}),
        compressor=Compressor(ratios={16}, overlapping_ratios={4}),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
    )

    requests: torch.Tensor
    """[T] int64: request of each row in the batch."""
    firsts: torch.Tensor
    """[T] int64: position of the first row that the request of each row has in the step."""
    lens: torch.Tensor
    """[bs] int64: tokens of each request with those of the step."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.compressor is not None
        self.pool, self.table = context.compressor.pool, context.compressor.rope

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        rows, bs = batch.input_ids.shape[0], batch.batch_size
        at = torch.arange(rows, device=batch.seq_lens.device)
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            counts = batch.extend_seq_lens.long()
            self.requests = (at[:, None] >= counts.cumsum(0)).sum(1).clamp(max=bs - 1)
        else:
            counts = torch.full((bs,), rows // max(bs, 1), device=at.device)
            self.requests = at // max(rows // max(bs, 1), 1)
        self.begin(batch, counts, at)

    def begin(self, batch: ForwardBatch, counts: torch.Tensor, at: torch.Tensor) -> None:
        """Find the first position of each row's request in the step. ``at`` [T]: number of each row."""
        before = counts.cumsum(0) - counts
        self.firsts = batch.positions.long() - (at - before[self.requests])
        self.lens = batch.seq_lens.long()

    @override
    def compress(
        self, kv: torch.Tensor, score: torch.Tensor, layer: CompressorLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        assert layer.ape is not None
        positions, slots = batch.positions.long(), batch.out_cache_loc.long()
        pages = self.context.req_to_token[batch.req_pool_indices.long()]
        states = self.pool.get_states(layer.layer_id)
        scores = self.stored_score(score.float() + self.bias_of(layer)[self.place(layer, positions)])
        states[slots] = torch.stack([kv.float(), scores], 1)
        complete = self.completes(layer, positions)
        row = self.row_of(layer, states, pages, positions, complete)
        row = self.summed(row)
        size = torch.sqrt((row * row).sum(-1, keepdim=True) / layer.head_dim + self.epsilon(layer))
        row = self.turned(self.scaled(row / size, layer), self.turned_by(layer, positions)).to(kv.dtype)
        row = torch.where(complete[:, None], row, 0.0)
        stored = self.stored(layer, positions, complete)
        target = torch.where(stored, self.target(layer, slots, positions, pages), 0)
        self.put(layer, target, torch.where(stored[:, None], row, 0.0))
        return row

    def put(self, layer: CompressorLayer, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Store compressed rows [T, D] in rows ``target`` [T] of the pool."""
        self.pool.get_rows(layer.layer_id)[target] = rows

    def bias_of(self, layer: CompressorLayer) -> torch.Tensor:
        """[r, c * D]: bias of the layer."""
        assert layer.ape is not None
        return layer.ape

    def place(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        """Place of each token in its group."""
        return positions % layer.compress_ratio

    def stored_score(self, score: torch.Tensor) -> torch.Tensor:
        """Scores with their bias, as the pool holds them."""
        return score

    def completes(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        """[T] bool: rows with which a group is complete."""
        return positions % layer.compress_ratio == layer.compress_ratio - 1

    def stored(self, layer: CompressorLayer, positions: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
        """[T] bool: rows that store a compressed row."""
        return complete

    def target(
        self, layer: CompressorLayer, slots: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """[T] int64: the compressed row that each row writes."""
        return slots // layer.compress_ratio

    def row_of(
        self,
        layer: CompressorLayer,
        states: torch.Tensor,
        pages: torch.Tensor,
        positions: torch.Tensor,
        complete: torch.Tensor,
    ) -> torch.Tensor:
        """[T, D] float32: weighted sums, token by token from the last to the first, with a running maximum."""
        ratio, wide = layer.compress_ratio, layer.head_dim
        most = torch.full((len(positions), wide), -torch.inf, device=states.device)
        total, row = torch.zeros_like(most), torch.zeros_like(most)
        for back in range(ratio * (2 if layer.overlaps else 1)):
            at = self.read_at(positions - back)
            exists = (self.exists(layer, at, back) & complete)[:, None]
            slot = pages[self.requests, at.clamp(0, pages.shape[1] - 1)].long()
            own = states[torch.where(exists[:, 0], slot, 0)]
            first = wide if layer.overlaps and self.is_own(layer, back) else 0
            kv, score = (each[:, first : first + wide] for each in own.unbind(1))
            score = torch.where(exists, score, self.score_of_nothing())
            kv = torch.where(exists, kv, 0.0)
            highest = torch.maximum(most, score)
            # -inf minus -inf is NaN: nothing has been read yet.
            kept = torch.where(most == -torch.inf, 0.0, torch.exp(most - highest))
            weight = torch.where(score == -torch.inf, 0.0, torch.exp(score - highest))
            total, row, most = total * kept + weight, row * kept + weight * kv, highest
        return torch.where(complete[:, None], row / torch.where(total > 0, total, 1.0), 0.0)

    def read_at(self, at: torch.Tensor) -> torch.Tensor:
        """[T] int64: position that is read in place of ``at``."""
        return at

    def exists(self, layer: CompressorLayer, at: torch.Tensor, back: int) -> torch.Tensor:
        """[T] bool: positions that a window has, ``back`` tokens before its last."""
        return at >= 0

    def is_own(self, layer: CompressorLayer, back: int) -> bool:
        """True for a token of the group itself, which is ``back`` tokens before its last."""
        return back < layer.compress_ratio

    def score_of_nothing(self) -> float:
        """Score of a token that does not exist."""
        return -torch.inf

    def summed(self, row: torch.Tensor) -> torch.Tensor:
        """Weighted sums as they are normalized."""
        return row

    def epsilon(self, layer: CompressorLayer) -> float:
        """Number in the norm."""
        return layer.norm_eps

    def scaled(self, row: torch.Tensor, layer: CompressorLayer) -> torch.Tensor:
        """A row of norm 1 times the weight of the norm."""
        assert layer.norm_weight is not None
        return row * layer.norm_weight

    def turned_by(self, layer: CompressorLayer, positions: torch.Tensor) -> torch.Tensor:
        """[T] int64: position by which a row is rotated."""
        return positions - positions % layer.compress_ratio

    def turned(self, row: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Rows with their last numbers rotated, in interleaved pairs."""
        cos, sin = (each.repeat_interleave(2, -1) for each in self.table[by].chunk(2, -1))
        tail = row[:, -_TURNED:].reshape(len(row), -1, 2)
        crossed = torch.stack([-tail[..., 1], tail[..., 0]], -1).flatten(1)
        return torch.cat([row[:, :-_TURNED], row[:, -_TURNED:] * cos + crossed * sin], -1)


class PackedParent(CompressorParent):
    """A right backend of rows of DeepSeek V4: FP8 with a power of two per 64 numbers, and a rope part in bf16."""

    capabilities = CompressorParent.capabilities.with_changes(
        heads={"families": {"compressor"}, "gqa_ratios": {1}, "head_dims": {512}},
        compressor=Compressor(ratios={16}, overlapping_ratios={4}, rows={"fp8_ds_mla_v4"}),
    )

    @override
    def put(self, layer: CompressorLayer, target: torch.Tensor, rows: torch.Tensor) -> None:
        tiles = rows[:, :-_TURNED].float().reshape(len(rows), -1, 64)
        exponents = self.exponents(torch.ceil(torch.log2(tiles.abs().amax(-1).clamp(min=0.05) / 448.0)))
        numbers = torch.clamp(tiles * torch.exp2(-exponents)[..., None], -448.0, 448.0).to(torch.float8_e4m3fn)
        raw = torch.cat([numbers.flatten(1).view(torch.uint8), rows[:, -_TURNED:].contiguous().view(torch.uint8)], 1)
        scales = torch.zeros(len(rows), 8, dtype=torch.uint8, device=rows.device)
        scales[:, :-1] = (exponents + 127).to(torch.uint8)
        self.put_bytes(layer, target, raw, scales)

    def exponents(self, exact: torch.Tensor) -> torch.Tensor:
        """[T, 7] float32: exponents of the scales of tiles."""
        return exact

    def put_bytes(self, layer: CompressorLayer, target: torch.Tensor, raw: torch.Tensor, scales: torch.Tensor) -> None:
        """Store numbers [T, 576] and scales [T, 8], both bytes."""
        pages, rows = self.pool.get_rows(layer.layer_id), self.context.page_size // layer.compress_ratio
        page, place = (target // rows)[:, None], (target % rows)[:, None]
        pages[page, self.first_of_numbers(place) + torch.arange(576, device=raw.device)] = raw
        pages[page, self.first_of_scales(place, rows) + torch.arange(8, device=raw.device)] = scales

    def first_of_numbers(self, place: torch.Tensor) -> torch.Tensor:
        """First byte of the numbers of a row in its page."""
        return place * 576

    def first_of_scales(self, place: torch.Tensor, rows: int) -> torch.Tensor:
        """First byte of the scales of a row in its page, which has this many rows."""
        return rows * 576 + place * 8
