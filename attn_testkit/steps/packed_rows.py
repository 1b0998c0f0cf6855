"""Packed rows of a KV pool as test data: keys with only one right packing, tiles of zeros, and scales that differ
within rounding."""

from __future__ import annotations

import numpy as np
import torch

from ..contract.row_format import (
    FP4,
    FP4_TIES,
    LARGEST,
    ZERO,
    PackedRows,
    Plane,
    codes_of,
    in_tiles,
    next_power_of_two,
)

_NEAR_TIE = 2.0**-14
_ULPS = 4
"""Allowed error of a scale in units in the last place: division on a GPU may be off by two."""


def with_one_packing(packed: PackedRows, keys: torch.Tensor, by: torch.Tensor | float = 1.0) -> torch.Tensor:
    """A copy of ``keys`` [..., width] in 16 bits that rounds the same way for every method of computing scales.

    Values near a rounding midpoint are moved one unit toward zero. The largest values of a tile are reduced if its
    scale is near such a midpoint, or its quotient near a power of two. Each tile has a value that is not tiny, because
    servers treat tiny tiles differently (SGLang stores -448 and a scale of 0, vLLM has a smallest scale). ``by``: scale
    of the layer, a power of two, by which keys are divided.
    """
    keys = keys + 0.0  # no -0, of which a format may have none
    for plane in packed.format.planes:
        scales = packed.scales_of(plane)
        if plane.is_scales or (scales is None and plane.dtype not in LARGEST):
            continue
        part = keys[..., packed.part(plane)]
        tiles = in_tiles(part, scales.tile if scales else 0)
        if scales is not None and packed.zeros_of(plane) is not None:
            _with_one_number(packed, plane, keys, tiles, scales.least)
            continue
        if scales is not None:
            least = torch.as_tensor(scales.least * by, dtype=tiles.dtype)
            tiles[..., -1] = torch.where(tiles.abs().amax(-1) < least, least, tiles[..., -1])
            most = (_most(packed, scales, keys / by) * torch.as_tensor(by)[..., None]).to(tiles.dtype)
            tiles.copy_(torch.minimum(torch.maximum(tiles, -most), most))
        exact = in_tiles((part / by).float(), scales.tile if scales else 0)
        if scales is not None:
            exact = exact / packed.scales(scales, keys / by)[..., None]
        low, high = (codes_of(exact * (1 + off), plane.dtype) for off in (-_NEAR_TIE, _NEAR_TIE))
        tiles.view(torch.int16).sub_((low != high).to(torch.int16))
    return keys


_QUARTER, _SMALL = 0.25, 64
"""A number this far above an integer is rounded down to it. It has 16 bits up to the second one, before the zero is
added."""


def _with_one_number(packed: PackedRows, plane: Plane, keys: torch.Tensor, tiles: torch.Tensor, least: float) -> None:
    """Change ``tiles``, views of ``keys``, of numbers with a zero, so that their range is at least ``least``, and none
    is near a rounding midpoint. The largest of a tile, which is the number at one end, stays. So does the smallest, but
    if the zero would be an integer it is a unit closer to 0.
    """
    low, high = tiles.amin(-1, keepdim=True), tiles.amax(-1, keepdim=True)
    small = torch.maximum(low.abs(), high.abs()) < least
    other = torch.where(small, torch.where(low > 0, -least, least), -low.clamp(max=0)).to(tiles.dtype)
    tiles[..., -1:] = torch.where(high - low < least, other, tiles[..., -1:])
    scales, zeros = packed.scales_of(plane), packed.zeros_of(plane)
    assert scales is not None
    assert zeros is not None
    # A number that equals a zero means 0. PyTorch divides by a constant on a GPU by its reciprocal: the zero may have
    # other bits then, and their difference would be the value.
    zero, low = packed.scales(zeros, keys)[..., None], tiles.amin(-1, keepdim=True)
    one_less = (low.contiguous().view(torch.int16) - 1).view(tiles.dtype)
    whole = (low < 0) & ((zero - zero.round()).abs() <= _NEAR_TIE * zero)
    tiles.copy_(torch.where(whole & (tiles == low), one_less, tiles))
    scale, zero = (packed.scales(each, keys)[..., None] for each in (scales, zeros))
    for last in (False, False, True):
        found = packed.quotients(plane, keys)
        off = _NEAR_TIE * (found.abs() + 2 * zero.abs())
        near = codes_of(found - off, plane.dtype) != codes_of(found + off, plane.dtype)
        moved = ((found.floor() + _QUARTER - zero) * scale).to(tiles.dtype)
        one_less = (tiles.view(torch.int16) - 1).view(tiles.dtype)
        moved = torch.where((found - zero).abs() < _SMALL, moved, one_less)
        tiles.copy_(torch.where(near, tiles.amin(-1, keepdim=True) if last else moved, tiles))


_UNIT, _UNIT_OF_FP4 = 2.0**-8, 0.25
"""Scale of tiles of halfway numbers. That of FP4 is a normal number of e4m3."""
_MOST_HALFWAY = 0x7C
"""Code of 384 in e4m3: the number halfway to the next one is 400."""
_BELOW_A_POWER = {torch.float8_e4m3fn: 352.0, FP4: 5.0}
"""Largest quotient of a tile whose scale is a power of two. Divided by the largest number of the dtype it is not near
a power of two, and rounds up to one unit. In FP4 it is a middle, too."""
_OF_FP4 = 2.0
"""Factor of unit normals that makes middles of FP4, of which each occurs."""
_EXPONENTS = 12
"""Adjacent numbers differ by a power of two, down to those that are halfway between the smallest and 0."""


def with_halfway_numbers(packed: PackedRows, keys: torch.Tensor, by: torch.Tensor | float = 1.0) -> torch.Tensor:
    """A copy of ``keys`` [..., width] in 16 bits whose quotients are exactly between two adjacent numbers, in each
    plane with a rule for that (``Plane.halfway``). Scales of tiles are a power of two, so scales and quotients are
    exact in each method: by division, also by Triton's approximate one on an H200, and by reciprocals. ``by``: as in
    ``with_one_packing``.
    """
    keys = with_one_packing(packed, keys, by)
    for plane in packed.format.planes:
        if not plane.halfway:
            continue
        scales, part = packed.scales_of(plane), keys[..., packed.part(plane)]
        tiles = _middles(plane.dtype, (part / by).float(), scaled=bool(scales))
        tiles = in_tiles(tiles, scales.tile if scales else 0)
        if scales:
            powers = scales.rule == "power_of_two"
            tiles[..., -1] = _BELOW_A_POWER[plane.dtype] if powers else LARGEST[plane.dtype]
        unit = _UNIT_OF_FP4 if plane.dtype == FP4 else _UNIT
        part.copy_(tiles.flatten(-2) * (unit if scales else 1.0) * by)
    return keys


def _middles(dtype: torch.dtype, numbers: torch.Tensor, *, scaled: bool) -> torch.Tensor:
    """Middles between two adjacent numbers of ``dtype``, drawn by unit normals ``numbers`` [..., n], with their signs.
    ``scaled``: the numbers are quotients by a scale."""
    if dtype == FP4:
        # Next to 0 only positive numbers: not every store has a -0.
        codes = codes_of(numbers * _OF_FP4, FP4) & 7
        middle = torch.tensor(FP4_TIES)[codes.clamp(max=len(FP4_TIES) - 1).long()]
        return torch.where((numbers < 0) & (codes > 0), -middle, middle)
    largest = LARGEST[dtype]
    if dtype != torch.float8_e4m3fn:
        whole = (numbers * largest / 4).trunc().clamp(1 - largest, largest - 1)
        return (whole + 0.5).clamp(max=largest - 0.5)
    numbers = numbers * (256.0 if scaled else 2.0)
    numbers = numbers * torch.exp2(-(torch.arange(numbers.shape[-1]) % _EXPONENTS).float())
    codes = numbers.abs().clamp(max=largest).to(dtype).view(torch.uint8).clamp(max=_MOST_HALFWAY)
    middle = (codes.view(dtype).float() + (codes + 1).view(dtype).float()) / 2
    return torch.where((numbers < 0) & (codes > 0), -middle, middle)


_A_UNIT_LESS = 1 - 2.0**-7.5
"""Factor that makes a 16-bit number one or two units smaller."""
_OFF_A_POWER = 2.0**-4
"""Distance from a power of two: 2^-5, more than the error of a quotient whose logarithm is computed in bf16 (SGLang's
FP4MXBlock16KVQuantizeUtil). No midpoint between two numbers of a format is this close."""


def _most(packed: PackedRows, scales: Plane, keys: torch.Tensor) -> torch.Tensor:
    """[..., tiles, 1] float32: the largest magnitude that a tile may have so that every method gives one scale; inf: no
    bound."""
    of = next(each.dtype for each in packed.format.planes if each.of == scales.of and not each.is_scales)
    exact = packed.exact_scales(scales, keys)[..., None]
    if scales.rule == "power_of_two":
        # A logarithm does not tell a power of two from numbers next to it.
        below = next_power_of_two(exact * (1 - _OFF_A_POWER))
        near = (below != next_power_of_two(exact)) | (below == exact)
        return torch.where(near, below * LARGEST[of] * _A_UNIT_LESS, torch.inf)
    if scales.dtype == torch.float32:
        return torch.full_like(exact, torch.inf)
    low, high = (scales.rounded(exact * (1 + off)) for off in (-_NEAR_TIE, _NEAR_TIE))
    return torch.where(low != high, exact * LARGEST[of] * _A_UNIT_LESS, torch.inf)


_ROWS, _ONE_LEFT, _SOME = 0.125, 0.25, 0.5
"""Bounds of a draw in 0 .. 1: below the first a row is zeros, below the second all but one of its tiles are, and below
the third each tile is with a probability of a quarter."""
_OF_SOME = 0.25


def zero_tiles(packed: PackedRows, shape: torch.Size, seed: int, ends: tuple[int, int]) -> torch.Tensor:
    """[L, B, S, Hk, width] bool: elements of keys of this ``shape`` that are 0 in data with tiles of zeros. The largest
    magnitude of such a tile is 0, and so is a scale computed from it; 0 / 0 is NaN (aiter #4195). ``ends``: a request
    and a position whose row is always zeros in the first layer and head.
    """
    width = min(packed.latent, shape[-1])
    tile = packed.scale_planes[0].tile or width
    count, rng = width // tile, np.random.default_rng(seed)
    kind = rng.random(shape[:4])
    kind[0, ends[0], ends[1], 0] = 0.0
    empty = rng.random((*shape[:4], count)) < _OF_SOME
    one = rng.integers(0, count, shape[:4])[..., None] == np.arange(count)
    empty = np.where(kind[..., None] < _ONE_LEFT, ~one, empty & (kind < _SOME)[..., None])
    empty |= (kind < _ROWS)[..., None]
    whole = np.zeros(shape, np.bool_)
    whole[..., :width] = empty.repeat(tile, -1)
    return torch.from_numpy(whole)


def accepted(packed: PackedRows, rows: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """A copy of ``rows`` with the scales of ``want``, if they differ only by rounding. [..., bytes] uint8. Tiles of
    zeros are replaced by those of ``want``, too, if all of their products are 0: servers store a scale of 0, the
    smallest scale or 1, and any value next to a scale of 0. So are bytes that mean nothing.
    """
    rows = rows.clone()
    for got, due in zip(packed.unused(rows), packed.unused(want), strict=True):
        got.copy_(due)
    for plane in packed.scale_planes if rows.numel() else ():
        if plane.dtype == torch.float32:
            got, due = (packed.planes(each)[plane.name] for each in (rows, want))
            # A zero is a quotient by a scale; one of 0 may have either sign.
            ulps = _ULPS * (2 if plane.rule == ZERO else 1)
            near = ((got.view(torch.int32) - due.view(torch.int32)).abs() <= ulps) | (got == due)
            got.copy_(torch.where(near, due, got))
        zeros = (holds_zeros(packed, plane, want) & holds_zeros(packed, plane, rows))[..., None]
        if not zeros.any():
            continue
        for each in packed.format.planes:
            if each.of == plane.of:
                own, due = (packed.by_tile(of, each, zeros.shape[-2]) for of in (rows, want))
                packed.put_by_tile(rows, each, torch.where(zeros, due, own))
    return rows


def holds_zeros(packed: PackedRows, plane: Plane, rows: torch.Tensor) -> torch.Tensor:
    """[..., tiles] bool: tiles of the scales of ``plane`` in which all values of ``rows`` [..., bytes] are 0."""
    return (in_tiles(packed.unpack(rows)[..., packed.part(plane)], plane.tile) == 0).all(-1)
