"""Packed rows of a KV pool as test data: keys with one right packing, and scales that differ by rounding only."""

from __future__ import annotations

import torch

from ..contract.row_format import LARGEST, PackedRows, Plane, codes_of, in_tiles, next_power_of_two

__all__ = ["accepted", "with_one_packing"]

_NEAR_TIE = 2.0**-14
_ULPS = 4
"""Units in the last place that a scale may be off: division on a GPU may be off by two."""


def with_one_packing(packed: PackedRows, keys: torch.Tensor, by: torch.Tensor | float = 1.0) -> torch.Tensor:
    """A copy of ``keys`` [..., width] in 16 bits whose numbers are rounded in one way, however a scale is computed.

    Numbers near the middle between two that the format has are one unit smaller, as are the largest of a tile whose
    scale is near such a middle, and each tile has a number that is not tiny: there servers differ (SGLang stores -448
    and a scale of 0, vLLM has a smallest scale). ``by``: scale of the layer, a power of two, that keys are divided by.
    """
    keys = keys + 0.0  # no -0, of which a format may have none
    for plane in packed.format.planes:
        scales = packed.scales_of(plane)
        if plane.is_scales or (scales is None and plane.dtype not in LARGEST):
            continue
        part = keys[..., packed.part(plane)]
        tiles = in_tiles(part, scales.tile if scales else 0)
        if scales is not None:
            least = torch.as_tensor(scales.least * by, dtype=tiles.dtype)
            tiles[..., -1] = torch.where(tiles.abs().amax(-1) < least, least, tiles[..., -1])
            size = tiles.abs()
            unclear = _unclear_scale(packed, scales, keys / by) & (size == size.amax(-1, keepdim=True))
            tiles.view(torch.int16).sub_(unclear.to(torch.int16))
        exact = in_tiles((part / by).float(), scales.tile if scales else 0)
        if scales is not None:
            exact = exact / packed.scales(scales, keys / by)[..., None]
        low, high = (codes_of(exact * (1 + off), plane.dtype) for off in (-_NEAR_TIE, _NEAR_TIE))
        tiles.view(torch.int16).sub_((low != high).to(torch.int16))
    return keys


def _unclear_scale(packed: PackedRows, scales: Plane, keys: torch.Tensor) -> torch.Tensor:
    """[..., tiles, 1] bool: True for tiles whose scale depends on how it is computed."""
    exact = packed.exact_scales(scales, keys)[..., None]
    if scales.rule == "power_of_two":
        # A logarithm in float32 does not tell a power of two from those next to it. Quotients are exact.
        return next_power_of_two(exact.contiguous()) == exact
    if scales.dtype == torch.float32:
        return torch.zeros_like(exact, dtype=torch.bool)
    largest = LARGEST.get(scales.dtype, torch.inf)
    low, high = ((exact * (1 + off)).clamp(max=largest).to(scales.dtype) for off in (-_NEAR_TIE, _NEAR_TIE))
    return low.float() != high.float()


def accepted(packed: PackedRows, rows: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """A copy of ``rows`` with the scales of ``want``, where they differ by rounding only. [..., bytes] uint8."""
    rows = rows.clone()
    for plane in packed.scale_planes:
        if plane.dtype == torch.float32:
            got, due = (packed.planes(each)[plane.name] for each in (rows, want))
            near = (got.view(torch.int32) - due.view(torch.int32)).abs() <= _ULPS
            got.copy_(torch.where(near, due, got))
    return rows
