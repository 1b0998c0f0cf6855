"""The data of layers that compress keys: ``kv`` and ``score`` of each token, parameters of layers, and rotations.

Numbers are those of softmax layers of one head: a token's key is the part of ``kv`` that counts in its own group, its
value that of ``score``. In overlapping layers the other part has the same numbers in another order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache

import numpy as np
import torch
from cachetools import LRUCache, cached

from ...cases.compression import Compression
from ...cases.fields import Fields
from ...cases.normals import normals
from ...contract import COMPRESSED_ROPE, ROW_FORMATS, CompressorLayer, PackedRows
from ...steps.data import KEPT_BYTES, StepData, bytes_in, make_step_data, numbers_of
from ...steps.schedule import Schedule, Step

_SEED, _MIXED = 0xC03B, 0x9E3779B1
_EPSILONS = (1e-6, 0.25)
"""Epsilons of layers: that of models, and one that counts next to squares of about 1."""


def compression_of(case: Fields) -> Compression:
    """Groups of a case that has any."""
    assert case.compression is not None
    return case.compression


@lru_cache(maxsize=16)
def layers(case: Fields) -> tuple[CompressorLayer, ...]:
    """The layers of the test model, on the host. All have groups of one size, and parameters of their own."""
    case = case.instance_of or case
    compression, wide = compression_of(case), case.head_dim
    rng = np.random.default_rng((_SEED, compression.ratio, wide))
    columns = wide * (2 if compression.overlaps else 1)
    return tuple(
        CompressorLayer(
            layer_id=case.layers.first + place, tp_q_head_num=1, tp_k_head_num=1, head_dim=wide, v_head_dim=wide,
            scaling=0.0, family="compressor", compress_ratio=compression.ratio, overlaps=compression.overlaps,
            ape=normals((compression.ratio, columns), rng).float(),
            # Numbers of adjacent tiles differ in size, so that the scale of one does not fit another.
            norm_weight=(1.0 + normals((wide,), rng).float() / 4) * torch.exp2(torch.arange(wide) // 32 % 5 - 2.0),
            norm_eps=_EPSILONS[place % len(_EPSILONS)],
        )
        for place in range(case.layers.count)
    )  # fmt: skip


def rope_table(positions: int) -> torch.Tensor:
    """[positions, 64] float32: cosines and sines, in quarter turns, so that a rotation rounds nothing.

    Turns are bits of a hash of the position. Any rule that counts, as real tables do, has the same turns at positions
    that a backend may confuse: multiples of 4, or a group's number and its first position.
    """
    hashed = torch.arange(positions)[:, None] * _MIXED
    at = hashed >> (6 + 2 * (torch.arange(COMPRESSED_ROPE // 2) % 12)) & 3
    whole = torch.tensor([1.0, 0.0, -1.0, 0.0])
    return torch.cat([whole[at], whole[(at - 1) % 4]], -1)


def widened(rows: torch.Tensor, compression: Compression) -> torch.Tensor:
    """[..., c * D] of rows [..., D]."""
    return torch.cat([rows.flip(-1), rows], -1) if compression.overlaps else rows


@dataclass(frozen=True, eq=False)
class CompressorData(StepData):
    """Host tensors of a step. ``q`` and ``k`` are ``kv`` and ``score``, [L, T, 1, c * D]; ``v`` has no columns."""

    layers: tuple[CompressorLayer, ...] = ()
    compression: Compression = field(default_factory=lambda: Compression(2))
    dtype: str = "bf16"
    """Dtype of the model, by its name."""

    @property
    def packed(self) -> PackedRows | None:
        """Format of compressed rows in memory; None: the model's dtype."""
        form = ROW_FORMATS.get(self.compression.rows)
        return form.of(self.layers[0]) if form else None

    @cached_property
    def states(self) -> torch.Tensor:
        """[L, B, S, 2, c * D] float32: what each token of a request leaves, bit for bit."""
        assert self.stored_values is not None
        kv, score = (
            widened(each.squeeze(3), self.compression).float() for each in (self.stored_keys, self.stored_values)
        )
        at = torch.arange(kv.shape[2]) % self.compression.ratio
        bias = torch.stack([layer.ape[at] for layer in self.layers if layer.ape is not None])
        return torch.stack([kv, score + bias[:, None]], 3)


@cached(LRUCache(KEPT_BYTES, getsizeof=bytes_in), key=numbers_of, lock=threading.Lock())
def make_compressor_data(schedule: Schedule, step: Step, pattern: str | None = None) -> CompressorData:
    """Draw the numbers of a step."""
    case, data = schedule.case, make_step_data(schedule, step, pattern)
    compression = compression_of(case)
    found = {each.name: getattr(data, each.name) for each in fields(StepData)}
    inputs = {"q": widened(data.k, compression), "k": widened(data.v, compression), "v": data.v[..., :0]}
    return CompressorData(**found | inputs, layers=layers(case), compression=compression, dtype=case.dtype)
