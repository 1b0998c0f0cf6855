"""Queries of kernels that round them to FP8: numbers that are exact under this rounding with the declared scale.

A kernel that scales queries divides them by the largest |q| of a group over 448 (or by the next power of two), rounds
to e4m3, and multiplies the logits by that scale. Every head of every row has a largest |q| of 448 times a power of two
here. So the scale of any group is a power of two, and if all values of the group are e4m3 numbers times that scale,
nothing is rounded: limits need no allowance for it, and a kernel with a different scale is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

E4M3 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
"""Largest number of e4m3fn."""
STATIC = "static"
"""The word for scales that a checkpoint gives for each layer."""
_LARGE_FROM = 4.0
"""Least static scale of a layer whose large queries FP8 can hold; others have small ones."""
_SHARED = {"per_token_head": (3,), "per_token": (2, 3), "per_tensor": (1, 2, 3)}
"""Dimensions of [L, T, Hq, D] along which values share a scale, by ``Precision.q_scale``."""


def group_largest(sizes: torch.Tensor, q_scale: str) -> torch.Tensor:
    """[L, 1 or T, 1 or Hq, 1]: the largest of ``sizes`` [L, T, Hq, D or 1] in each group that shares a scale."""
    return sizes.amax(_SHARED[q_scale], keepdim=True)


def static_scales(of_layers: Sequence[float]) -> torch.Tensor:
    """[L, 1, 1, 1] float32: the checkpoint's scale of each layer's queries."""
    return torch.tensor(of_layers).view(-1, 1, 1, 1)


def held_queries(q: torch.Tensor, q_scale: str, of_layers: Sequence[float]) -> torch.Tensor:
    """``q`` [L, T, Hq, D] float32, changed to values that a kernel with this ``q_scale`` rounds to themselves.
    ``of_layers``: static scales."""
    if q_scale == STATIC:
        scales = static_scales(of_layers)
        return (q / scales).clamp(-LARGEST_FP8, LARGEST_FP8).to(E4M3).float() * scales
    largest = q.abs().amax(-1, keepdim=True)
    scales = torch.exp2((largest / LARGEST_FP8).log2().round())
    q = q * torch.where(largest > 0, scales * LARGEST_FP8 / largest, 1.0)
    shared = group_largest(scales, q_scale)
    shared = torch.where(shared > 0, shared, 1.0)
    return (q / shared).to(E4M3).float() * shared


def large_or_small(
    q: torch.Tensor, q_scale: str, rng: np.random.Generator, of_layers: Sequence[float] = ()
) -> torch.Tensor:
    """Keep either the last channel of each row of ``q`` [L, T, Hq, D], which is large, or the others, which are small.

    Rows that share a scale are alike, and adjacent rows are not. A tensor with one scale is all large, all small, or
    mixed: then small rows may vanish. A static scale decides for all rows of a layer.
    """
    layer, row, head = (torch.arange(count) for count in q.shape[:3])
    layer, row, head = layer[:, None, None], row[:, None], head
    first = int(rng.integers(0, 6))
    if q_scale == STATIC:
        large = (static_scales(of_layers) >= _LARGE_FROM)[..., 0]
    elif q_scale == "per_tensor":
        kind = (layer + first) % 3
        large = torch.where(kind == 2, row % 2, kind) == 0
    else:
        large = (layer + row + (head if q_scale == "per_token_head" else 0) + first) % 2 == 0
    last = torch.arange(q.shape[-1]) == q.shape[-1] - 1
    return q * (large.expand(q.shape[:3])[..., None] == last)


_ONE_OF = 4
"""Number of groups of queries, each with a scale, of which one is zeros."""


def some_zeros(q: torch.Tensor, q_scale: str) -> torch.Tensor:
    """``q`` [L, T, Hq, D] with groups of zeros, whose largest |q| is 0: every fourth token, or head of tokens.

    A scale that is computed like the others is 0 for such a group, and 0 / 0 is NaN (aiter #4195). ``per_tensor``
    and ``static``: no zeros.
    """
    if q_scale in ("per_tensor", STATIC):
        return q
    layer, row, head = (torch.arange(count) for count in q.shape[:3])
    place = layer[:, None, None] + row[:, None] + (head if q_scale == "per_token_head" else head * 0)
    return torch.where((place % _ONE_OF == _ONE_OF - 1)[..., None], 0.0, q)
