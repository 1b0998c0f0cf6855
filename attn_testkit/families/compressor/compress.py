"""The oracle of layers that compress keys: compressed rows in float64, and how far rounding may move them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ...contract import COMPRESSED_ROPE, CompressorLayer, PackedRows
from ...contract.row_format import in_tiles
from ..rounding import FLOAT32, FLUSHED, SMALLEST, UNIT_ROUNDOFF
from .data import CompressorData, rope_table

Slip = Literal[
    "",
    "halves",
    "own group",
    "this step",
    "zeros",
    "late",
    "no norm",
    "own position",
    "next group",
    "no rotation",
    "other pairs",
]
"""A mistake of a backend; ``SLIPS`` in ``family.py`` has them in words. Empty: the right result."""


class Compressed(NamedTuple):
    """Compressed rows of the tokens that complete a group; zeros for the others. Float64."""

    rows: torch.Tensor
    """[L, T, D]."""
    limit: torch.Tensor
    """[L, T, D]: the largest allowed error."""
    ends: torch.Tensor
    """[T] bool: tokens that complete a group."""


def compress(data: CompressorData, slip: Slip = "") -> Compressed:
    """Compress the groups that the rows of a step complete.

    A backend may round the weighted sum to the model's dtype before it is normalized and the row before it is rotated,
    as DeepSeek's own ``Compressor`` does; the limit has a rounding for each.
    """
    compression, states = data.compression, data.states
    ends = (data.positions + 1) % compression.ratio == 0
    request, position = data.row_request[ends], data.positions[ends]
    place = torch.arange(compression.window)
    at = position[:, None] + 1 - compression.window + place - int(slip == "late")
    there = at >= 0
    if slip == "this step":
        there &= at >= (position - data.row_offset[ends])[:, None]
    if slip == "own group":
        there &= place >= compression.window - compression.ratio
    found = states[:, request[:, None], at.clamp(min=0)]
    if compression.overlaps:
        # Tokens of the group before have the first half of the columns, those of the group itself the second.
        first, second = torch.tensor_split(found, 2, -1)
        earlier = (place < compression.ratio) ^ (slip == "halves")
        found = torch.where(earlier[:, None, None], first, second)
    shape = (len(states), len(ends), data.layers[0].head_dim)
    rows, limit = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    starts = (position + 1 - compression.ratio).clamp(min=0)
    if slip == "own position":
        starts = position
    elif slip == "next group":
        starts = starts // compression.ratio
    table = rope_table(int(position.max()) + 1 if len(position) else 1).double()[starts]
    if slip == "no rotation":
        cos, sin = torch.split(table, COMPRESSED_ROPE // 2, -1)
        table = torch.cat([torch.ones_like(cos), torch.zeros_like(sin)], -1)
    for index, layer in enumerate(data.layers):
        made, off = _row(layer, found[index].double(), there, table, data.dtype, slip)
        if data.packed is not None and len(made):
            off = off + _packing(data.packed, made, off)
        rows[index, ends], limit[index, ends] = made, off
    return Compressed(rows, limit, ends)


def _packing(packed: PackedRows, rows: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """Bound what packing moves in rows [n, D] that are known to within ``off``. The scale of a tile may be the next
    power of two, if its largest number is near one."""
    moved = torch.zeros_like(rows)
    for plane in packed.scale_planes:
        part, numbers = packed.part(plane), packed.numbers_of(plane).dtype
        sizes = in_tiles(rows[..., part].abs() + off[..., part], plane.tile)
        scale = (4 * sizes.amax(-1, keepdim=True) / torch.finfo(numbers).max).clamp(min=2 * plane.smallest)
        moved[..., part] = (UNIT_ROUNDOFF["fp8_e4m3"] * sizes + scale * _HALF_OF_THE_SMALLEST).flatten(-2)
    return moved


_HALF_OF_THE_SMALLEST = 2.0**-10
"""Half of the smallest number of e4m3."""


def _row(
    layer: CompressorLayer, states: torch.Tensor, there: torch.Tensor, table: torch.Tensor, dtype: str, slip: Slip
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, D] of windows: states [n, W, 2, D], of which ``there`` [n, W] exist; and their limits."""
    unit, missing = UNIT_ROUNDOFF[dtype], ~there[..., None]
    # Slots of tokens that do not exist hold arbitrary numbers here.
    empty = 0.0 if slip == "zeros" else -torch.inf
    kv, score = states[..., 0, :].masked_fill(missing, 0.0), states[..., 1, :].masked_fill(missing, empty)
    most = score.amax(1, keepdim=True)
    weights = torch.softmax(score, 1)
    sums = (weights * kv).sum(1)
    # Errors of an exponent, of the sum of weights, and of the sum of products.
    of_weight = FLOAT32 * (2 * (score.abs() + most.abs()).nan_to_num(posinf=0.0) + kv.shape[1] + 16)
    off = 2 * (weights * kv.abs() * of_weight).sum(1) + unit * sums.abs() + FLUSHED
    wide = sums.shape[-1]
    size = (sums.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt()
    assert layer.norm_weight is not None
    weight = layer.norm_weight.double()
    if slip == "no norm":
        size, weight = torch.ones_like(size), torch.ones_like(weight)
    # The norm of the row moves by as much as all of its numbers together.
    moved = (sums.abs() * off).sum(-1, keepdim=True) / (wide * size.square()) + FLOAT32 * (wide**0.5 + 8)
    row = sums / size * weight
    off = (off + sums.abs() * moved) / size * weight.abs() + 2 * unit * row.abs()
    turned, spread = _rotated(row, off, table, slip)
    return turned, 2 * (spread + unit * turned.abs()) + 2 * SMALLEST[dtype]


def _rotated(
    row: torch.Tensor, off: torch.Tensor, table: torch.Tensor, slip: Slip
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row with its last numbers rotated, and the limits of its errors."""
    kept, half = row.shape[-1] - COMPRESSED_ROPE, COMPRESSED_ROPE // 2
    cos, sin = torch.split(table, half, -1)
    tail, errors = row[..., kept:], off[..., kept:]
    apart = slip == "other pairs"
    x, y = torch.tensor_split(tail, 2, -1) if apart else (tail[..., ::2], tail[..., 1::2])
    ex, ey = errors[..., ::2], errors[..., 1::2]
    pair, wrong = (
        (x * cos - y * sin, y * cos + x * sin),
        (ex * cos.abs() + ey * sin.abs(), ey * cos.abs() + ex * sin.abs()),
    )
    turned = torch.cat(pair, -1) if apart else torch.stack(pair, -1).flatten(-2)
    return torch.cat([row[..., :kept], turned], -1), torch.cat(
        [off[..., :kept], torch.stack(wrong, -1).flatten(-2)], -1
    )
