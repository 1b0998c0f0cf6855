"""The rotation of index queries and keys in cases: quarter turns, which move numbers and change signs, so that data
stay exact."""

from __future__ import annotations

import torch

from ..contract.index_rope import INDEX_ROPE, rotated_index

_PERIOD, _FREQUENCIES = 4, 3
OTHER_STYLE = {"neox": "interleaved", "interleaved": "neox"}


def turns_of(positions: torch.Tensor) -> torch.Tensor:
    """[n, 64] float32: cosines and sines of ``positions`` [n] int64. Pair i turns i % 3 + 1 times as fast as a position
    is counted."""
    pair = torch.arange(INDEX_ROPE // 2, device=positions.device)
    turns = positions[:, None] * (pair % _FREQUENCIES + 1) % _PERIOD
    whole = torch.tensor([1.0, 0.0, -1.0, 0.0], device=positions.device)
    return torch.cat([whole[turns], whole[(turns - 1) % _PERIOD]], -1)


def before_rotation(rows: torch.Tensor, turns: torch.Tensor, style: str) -> torch.Tensor:
    """[T, ..., 128] float32: index queries or keys that ``turns`` [T, 64] rotate to ``rows`` [T, ..., 128]."""
    cos, sin = torch.split(turns, INDEX_ROPE // 2, -1)
    return rotated_index(rows, torch.cat([cos, -sin], -1), style)
