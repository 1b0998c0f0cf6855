"""Packed rows of a KV pool as test data: keys with one right packing, and scales that differ by rounding only."""

from __future__ import annotations

import torch

from ..contract.row_format import LARGEST, PackedRows, in_tiles, next_power_of_two

__all__ = ["accepted", "with_one_packing"]

_NEAR_TIE = 2.0**-14
_ULPS = 4
"""Units in the last place that a scale may be off: division on a GPU may be off by two."""


def with_one_packing(packed: PackedRows, keys: torch.Tensor) -> torch.Tensor:
    """A copy of ``keys`` [..., width] bfloat16 whose numbers are rounded in one way, however a scale is computed.

    Numbers near the middle between two FP8 numbers are one unit smaller, and no tile is all 0: there servers differ
    (SGLang stores -448 and a scale of 0, vLLM has a smallest scale).
    """
    keys = keys.clone()
    for plane in packed.format.planes:
        scales = packed.scales_of(plane)
        if plane.tile > 1 or scales is None:
            continue
        tiles = in_tiles(keys[..., packed.part(plane)], scales.tile)
        tiles[..., -1].masked_fill_((tiles == 0).all(-1), _NEAR_TIE)
        bits, size = tiles.view(torch.int16), tiles.abs()
        if scales.rule == "power_of_two":
            # A logarithm in float32 does not tell a power of two from those next to it. Quotients are exact.
            largest = size.amax(-1, keepdim=True)
            quotient = largest.float() / LARGEST[plane.dtype]
            unclear = (size == largest) & (next_power_of_two(quotient) == quotient)
        else:
            exact = tiles.float() / packed.scales(scales, keys)[..., None]
            low, high = ((exact * (1 + off)).to(plane.dtype).view(torch.uint8) for off in (-_NEAR_TIE, _NEAR_TIE))
            unclear = low != high
        bits.sub_(unclear.to(torch.int16))
    return keys


def accepted(packed: PackedRows, rows: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """A copy of ``rows`` with the scales of ``want``, where they differ by rounding only. [..., bytes] uint8."""
    rows = rows.clone()
    for plane in packed.format.planes:
        if plane.tile > 1:
            got, due = (packed.planes(each)[plane.name] for each in (rows, want))
            near = (got.view(torch.int32) - due.view(torch.int32)).abs() <= _ULPS
            got.copy_(torch.where(near, due, got))
    return rows
