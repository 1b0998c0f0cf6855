"""Class S: indexers that rotate their queries and keys, and quantize the queries."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, ForwardBatch, Indexer, Sparse

from .catalogue import fault
from .indexer import IndexerParent

_ROPE, _LARGEST = 64, 448.0


class RotatingIndexerParent(IndexerParent):
    """A right backend that rotates the first half of each index query and key, as vLLM's and aiter's fused kernels."""

    capabilities = IndexerParent.capabilities.with_changes(
        sparse=Sparse(topk={16}, indexer=Indexer(heads={4}, rotates="neox"))
    )

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """[32] int64 each: numbers that are the first and the second of a pair."""
        first = torch.arange(_ROPE // 2, device=device)
        return first, first + _ROPE // 2

    def turns(self, batch: ForwardBatch) -> torch.Tensor:
        """[T] int64: row of the table of cosines and sines for each row."""
        return batch.positions

    def rotated(self, rows: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Rows [T, n, 128] after their rotation, float32."""
        assert self.context.index_rope is not None
        cos, sin = torch.split(self.context.index_rope[self.turns(batch)][:, None], _ROPE // 2, -1)
        found, (first, second) = rows.float().clone(), self.places(rows.device)
        x, y = rows[..., first].float(), rows[..., second].float()
        found[..., first], found[..., second] = x * cos - y * sin, y * cos + x * sin
        return found.to(rows.dtype).float()

    def rotated_keys(self, rows: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Keys [T, 128] after their rotation."""
        return self.rotated(rows[:, None], batch)[:, 0]

    @override
    def store_index(self, k_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        super().store_index(self.rotated_keys(k_index, batch), layer, batch)

    @override
    def select(
        self, q_index: torch.Tensor, weights: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        rows = self.rotated(q_index, batch)
        scales = rows.abs().amax(-1).clamp(min=1e-4) / _LARGEST
        quantized = (rows / scales[..., None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return super().select(quantized, self.scaled(weights, scales), layer, batch)

    def scaled(self, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """[T, heads]: weights that include the scales of the queries."""
        return weights * scales


@fault("DeepSeek-V3.2-Exp, 17 November 2025 (its demo); general", "index-stored selects-best", "pairs")
class RotatesInTheOtherStyle(RotatingIndexerParent):
    """Neighboring numbers are rotated as a pair, as attention of the same model does, and not numbers i and i + 32."""

    @override
    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.arange(0, _ROPE, 2, device=device)
        return first, first + 1


@fault("general (a row's offset in place of its position)", "index-stored selects-best")
class RotatesByTheRow(RotatingIndexerParent):
    """Rows are rotated by their number in the batch, and not by their position in the request."""

    @override
    def turns(self, batch: ForwardBatch) -> torch.Tensor:
        table = self.context.index_rope
        assert table is not None
        return torch.arange(len(batch.positions), device=batch.positions.device) % len(table)


@fault("vLLM #40823, #43907 (the scale is folded into the weights)", "selects-best")
class WeightsWithoutTheScale(RotatingIndexerParent):
    """The scale of a quantized query is not multiplied into its weight, as before the two kernels were one."""

    @override
    def scaled(self, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return weights


@fault("ROCm/aiter #3451", "index-stored", "not rotated")
class KeysAsTheyCome(RotatingIndexerParent):
    """Queries are rotated, and keys are stored as they are given."""

    @override
    def rotated_keys(self, rows: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return rows
