"""A wrong packed row in words: which planes are wrong, what they hold, and the usual mistake that explains it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..contract.row_format import ALL_NAN, FP4, HALVES, LARGEST, PackedRows, Plane, in_tiles
from ..steps.packed_rows import holds_zeros

Other = tuple[str, torch.Tensor]
"""Name of another row, and its bytes [Hk, bytes]."""


def wrong_planes(packed: PackedRows, row: torch.Tensor, want: torch.Tensor, others: Iterable[Other] = ()) -> str:
    """Describe ``row`` [Hk, bytes] that should be ``want``; empty if both its numbers and its scales are wrong.

    ``others``: rows whose scales it may hold instead.
    """
    if any(_zeros_over_zero(packed, plane, row, want) for plane in packed.scale_planes):
        return (
            "a tile of zeros is NaN in it, and everything else is right: the scale of such a tile was computed as 0, "
            "and "
            "zeros were divided by it. Divide by a smallest scale there, or store zeros"
        )
    wrong = differing(packed, row, want)
    scales = [plane for plane in wrong if plane.is_scales]
    if rounded := next(filter(None, (_rounded_down(packed, plane, row, want) for plane in scales)), ""):
        return rounded
    one_for_all = [plane for plane in scales if _alike(packed.raw(row, plane)) and not _alike(packed.raw(want, plane))]
    if one_for_all:
        return "all its KV heads have the same scale: it was probably stored with one scale for all heads"
    if len(wrong) == len(scales):
        held = next(filter(None, (scales_held(packed, plane, row, want, others) for plane in scales)), "")
        why = held or "they were not stored, or are those of another row, head or step"
        return f"its values are right, but its {' and '.join(plane.name for plane in scales)} are wrong: {why}"
    if not scales:
        return next((text for plane in wrong if (text := _numbers(packed, plane, row, want))), "")
    return _in_other_units(packed, scales, row, want, [*others])


def _alike(scales: torch.Tensor) -> bool:
    """True if several KV heads have the same scales. ``scales`` [Hk, bytes]."""
    return len(scales) > 1 and bool((scales == scales[0]).all())


def _rounded_down(packed: PackedRows, plane: Plane, row: torch.Tensor, want: torch.Tensor) -> str:
    """Describe scales of which some are one number off, always to one side, and the others right, if the exact scale
    has to be rounded up: to a power of two, or to e4m3."""
    if plane.rule not in _UP or plane.dtype.itemsize > 1:
        return ""
    off = packed.raw(row, plane).int() - packed.raw(want, plane).int()
    wrong, number = off[off != 0], _UP[plane.rule]
    if len(wrong) == off.numel() or not bool((wrong == wrong[0]).all()) or abs(int(wrong[0])) != 1:
        return ""
    size, way = ("small", f"to the nearest {number}, or down") if int(wrong[0]) < 0 else ("large", "too far")
    return (
        f"{len(wrong)} of its {off.numel()} scales are one {number} too {size}, and the others are right: the "
        f"exact scale is probably rounded {way}, and has to be rounded up, so that the largest number of a tile fits"
    )


_UP = {"power_of_two": "power of two", "up": "e4m3 number"}
"""Rule of a scale that is rounded up -> what it is rounded to."""


def differing(packed: PackedRows, row: torch.Tensor, want: torch.Tensor) -> list[Plane]:
    """Planes in which ``row`` [..., bytes] differs from ``want``."""
    return [plane for plane in packed.format.planes if not torch.equal(packed.raw(row, plane), packed.raw(want, plane))]


def names_of_planes(packed: PackedRows, planes: Iterable[Plane], part: str) -> list[str]:
    """Names of planes of K or V (``part``). Planes of numbers are called values."""
    several = len({plane.of for plane in packed.format.planes if not plane.is_scales}) > 1

    def name(plane: Plane) -> str:
        if plane.is_scales:
            return f"{part} {plane.name}"
        return f"{part} values ({plane.of})" if several else f"{part} values"

    return [name(plane) for plane in planes]


def scales_held(
    packed: PackedRows, plane: Plane, row: torch.Tensor, want: torch.Tensor, others: Iterable[Other] = ()
) -> str:
    """Describe what a wrong plane of scales of ``row`` [Hk, bytes] holds; empty if nothing is known."""
    raw, due = packed.raw(row, plane), packed.raw(want, plane)
    if plane.stride > 1 and torch.equal(packed.by_tile(want, plane, raw.shape[-1])[..., 0], raw):
        return f"they are in the order of their tiles, and the format has those of every {plane.stride} tiles together"
    if bool((raw == ALL_NAN).all()):
        return "they are NaN as in an unowned slot, so they were not stored"
    held, right = _scales(packed, plane, row), _scales(packed, plane, want)
    if bool((held == held.flatten()[0]).all()):
        constant = float(held.flatten()[0])
        return f"all of them are {constant:.4g}{', as if they were reset' if constant in (0.0, 1.0) else ''}"
    for name, other in others:
        if torch.equal(packed.raw(other, plane), raw):
            return f"they are those of {name}"
    if len(raw) > 1 and any(torch.equal(due.roll(by, 0), raw) for by in range(1, len(raw))):
        return "they are those of other KV heads"
    ratio = held / right
    if bool(((ratio / ratio.flatten()[0] - 1).abs() < _SAME_FACTOR).all()):
        return f"they are {float(ratio.flatten()[0]):.4g} times the right ones"
    return ""


_SAME_FACTOR = 0.1
"""Error that rounding scales to 8 bits may cause in the ratio of two."""


def _in_other_units(
    packed: PackedRows, wrong: Sequence[Plane], row: torch.Tensor, want: torch.Tensor, others: Sequence[Other]
) -> str:
    """Describe a row whose numbers fit its scales, which are not the right ones; empty if it means something else.

    ``wrong``: planes of scales that are wrong.
    """
    if len(wrong) != 1 or packed.zeros_of(wrong[0]) is not None:
        return ""
    scales, part = wrong[0], packed.part(wrong[0])
    numbers = packed.numbers_of(scales)
    held, due = (in_tiles(packed.unpack(each)[..., part].double(), scales.tile) for each in (row, want))
    own, right = (_scales(packed, scales, each)[..., None] for each in (row, want))
    largest, differs = LARGEST[numbers.dtype], (own != right)[..., 0]
    # A number is off by half a unit, or by half of the last of its few bits, and is cut off at the largest one.
    off = (held - due).abs() <= (own + right) * _HALF + due.abs() * _ROUNDING_OF.get(numbers.dtype, 0.0)
    cut = (held.abs() >= largest * own * (1 - _HALF_A_UNIT)) & (due.abs() >= held.abs()) & (held * due > 0)
    if not bool((off | cut).all()) or not bool(due[differs].any(-1).all()):
        return ""
    heads = differs.any(-1).nonzero().flatten().tolist()
    names = [
        [name for name, other in others if torch.equal(packed.raw(other, scales)[head], packed.raw(row, scales)[head])]
        for head in heads
    ]
    saturated = ", and numbers beyond the largest one are cut off" if bool(cut[differs].any()) else ""
    text = f"its numbers fit its {scales.name}, but these are not the right ones"
    if all(names):
        whose = dict.fromkeys(each[0] for each in names)
        return (
            f"{text}: KV head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))} of {len(row)} "
            f"ha{'ve' if len(heads) > 1 else 's'} that of {' and '.join(whose)}{saturated}. Probably one scale is made "
            "for several rows, as the largest of all tokens of a step"
        )
    ratio = (own / right)[differs].flatten()
    if bool((ratio / ratio[0] - 1).abs().max() < _SAME_FACTOR):
        return (
            f"{text}: they are {float(ratio[0]):.3g} times those, as if the largest number was "
            f"{largest / float(ratio[0]):.3g} in place of {largest:.3g}{saturated}"
        )
    return f"{text}{saturated}: look at the rows or the largest number from which a scale is made"


_HALF, _HALF_A_UNIT = 0.51, 0.004
"""Part of a unit by which rounding moves an integer; part of the largest number that rounding may leave."""
_ROUNDING_OF = {torch.float8_e4m3fn: 2.0**-3}
"""Rounding error of two numbers of a dtype that has an exponent, as a part of them."""


def _scales(packed: PackedRows, plane: Plane, rows: torch.Tensor) -> torch.Tensor:
    """[Hk, tiles] float64: a plane of scales as numbers."""
    return packed.numbers_in(rows, plane).double()


def _zeros_over_zero(packed: PackedRows, plane: Plane, row: torch.Tensor, want: torch.Tensor) -> bool:
    """True if only tiles of ``plane`` that should be zeros are wrong, and those are NaN."""
    due, part = holds_zeros(packed, plane, want), packed.part(plane)
    held, right = (in_tiles(packed.unpack(each)[..., part], plane.tile) for each in (row, want))
    wrong = (held != right).any(-1)
    return bool(wrong.any() and due[wrong].all() and held[wrong].isnan().all())


def _numbers(packed: PackedRows, plane: Plane, row: torch.Tensor, want: torch.Tensor) -> str:
    held, due = packed.raw(row, plane), packed.raw(want, plane)
    if plane.dtype in HALVES and torch.equal((held >> 4) + (held & 15) * 16, due):
        return "the halves of each byte of two numbers are swapped: the first number is the lower half"
    if plane.dtype == FP4:
        return _numbers_of_fp4(held, due)
    if plane.dtype not in HALVES and bool(
        ((held.view(torch.int8).int() - due.view(torch.int8).int()).abs() <= 1).all()
    ):
        return (
            "its scales are right, but its values are one step from the right ones: they were probably truncated "
            "instead of rounded, or their quotients rounded to 16 bits first"
        )
    return "its scales are right, but its values are wrong"


def _numbers_of_fp4(held: torch.Tensor, due: torch.Tensor) -> str:
    """Describe wrong bytes of two FP4 numbers each. The lower three bits of a number are the place of its magnitude."""
    of_held, of_due = (torch.stack((each & 15, each >> 4)).int() for each in (held, due))
    steps = (of_held & 7) - (of_due & 7)
    if bool(((of_held ^ of_due) & 8).any() or (steps.abs() > 1).any()):
        return "its scales are right, but its values are wrong"
    text = "its scales are right, but its values are one step from the right ones"
    if bool((steps >= 0).all()):
        return f"{text}, farther from zero: probably its store rounds quotients between two numbers away from zero"
    if bool((steps <= 0).all()):
        return f"{text}, nearer to zero: probably its store truncates, or rounds quotients between two numbers to zero"
    return text
