"""Errors of queries that are rounded to FP8 (e4m3) after a division by a scale.

A group of numbers that share a scale is divided by s, its largest absolute value over 448, or by t, the smallest power
of two that is at least s. An e4m3 number has three bits of mantissa, and below 2^-6 a spacing of 2^-9. So a query x is
off by at most

    max(2^-4 |x|, 2^-10 t),  and by no more than |x|, because 0 is a number too. The error is 0 if s is a power of two
    in every group that x may belong to, and x / s is an e4m3 number for the largest s: a smaller power of two makes x /
    s larger by a power of two, up to 448. The queries of the kit's cases have this property
    (``steps/query_scales.py``). The remaining errors are those of
rows that are small next to the largest of their tensor. With static scales there is none.
"""

from __future__ import annotations

import torch

from ...steps.query_scales import E4M3, LARGEST_FP8, STATIC, group_largest

_RELATIVE = 2.0**-4
"""Half a spacing of e4m3, relative to the number."""
_ABSOLUTE = 2.0**-10
"""Half a spacing below the smallest normal number, in units of the scale."""
_MANTISSA = 0.5
"""Mantissa of a power of two in ``torch.frexp``."""


def query_rounding(q: torch.Tensor, q_scale: str) -> torch.Tensor | None:
    """[L, T, Hq, D] float64: limit of each of ``q`` [L, T, Hq, D], for all rows of a forward. ``q_scale``: as in
    ``Capabilities``. None if nothing is rounded.
    """
    if q_scale in ("none", STATIC) or not q.numel():
        return None
    q = q.double()
    sizes = q.abs()
    of_heads = group_largest(sizes, "per_token_head") / LARGEST_FP8
    scale = group_largest(of_heads, q_scale)
    uneven = (of_heads > 0) & (torch.frexp(of_heads).mantissa != _MANTISSA)
    exact = group_largest(uneven.double(), q_scale) == 0
    ratio = q / torch.where(scale > 0, scale, 1.0)
    held = ratio.to(E4M3).double() == ratio
    off = torch.minimum(sizes, torch.maximum(_RELATIVE * sizes, _ABSOLUTE * torch.exp2(scale.log2().ceil())))
    off = off.masked_fill(exact & held, 0.0)
    return off if off.any() else None
