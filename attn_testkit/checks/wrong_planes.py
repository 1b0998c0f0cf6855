"""A wrong packed row in words: which of its planes are wrong, and by what mistake if it is a usual one."""

from __future__ import annotations

import torch

from ..contract.row_format import HALVES, PackedRows, Plane, in_tiles
from ..steps.packed_rows import holds_zeros


def wrong_planes(packed: PackedRows, row: torch.Tensor, want: torch.Tensor) -> str:
    """Describe ``row`` [Hk, bytes] that should be ``want``; empty if its numbers and its scales are both unlike."""
    if any(_zeros_over_zero(packed, plane, row, want) for plane in packed.scale_planes):
        return (
            "a tile of zeros is NaN in it, and all else is right: the scale of such a tile was computed as 0, and "
            "zeros were divided by it. Divide by a smallest scale there, or store zeros"
        )
    wrong = [
        plane for plane in packed.format.planes if not torch.equal(packed.raw(row, plane), packed.raw(want, plane))
    ]
    scales = [plane for plane in wrong if plane.is_scales]
    one_for_all = [
        plane for plane in scales if len(row) > 1 and (packed.raw(row, plane) == packed.raw(row, plane)[0]).all()
    ]
    if one_for_all:
        return "all its KV heads have the same scale: it was probably stored with one scale for all heads"
    if len(wrong) == len(scales):
        return (
            "its numbers are right, and its scales are not: they were not stored, or are those of another row, head or "
            "step"
        )
    if not scales:
        return next((text for plane in wrong if (text := _numbers(packed, plane, row, want))), "")
    return ""


def _zeros_over_zero(packed: PackedRows, plane: Plane, row: torch.Tensor, want: torch.Tensor) -> bool:
    """True if of the tiles of ``plane`` only some that should be zeros are wrong, and these are NaN."""
    due, part = holds_zeros(packed, plane, want), packed.part(plane)
    held, right = (in_tiles(packed.unpack(each)[..., part], plane.tile) for each in (row, want))
    wrong = (held != right).any(-1)
    return bool(wrong.any() and due[wrong].all() and held[wrong].isnan().all())


def _numbers(packed: PackedRows, plane: Plane, row: torch.Tensor, want: torch.Tensor) -> str:
    held, due = packed.raw(row, plane), packed.raw(want, plane)
    if plane.dtype in HALVES and torch.equal((held >> 4) + (held & 15) * 16, due):
        return "the halves of each byte of two numbers are swapped: the first number is the lower half"
    if plane.dtype not in HALVES and bool(
        ((held.view(torch.int8).int() - due.view(torch.int8).int()).abs() <= 1).all()
    ):
        return (
            "its scales are right, and it holds the numbers next to the right ones: they were probably truncated "
            "instead of rounded, or their quotients rounded to 16 bits first"
        )
    return "its scales are right, and its numbers are not"
