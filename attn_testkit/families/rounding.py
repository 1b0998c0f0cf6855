"""Effects of rounding in any family: unit roundoffs of dtypes, and limits that follow from limits on outputs."""

from __future__ import annotations

import torch

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp8_e4m3": 2.0**-4, "tf32": 2.0**-10}
"""Unit roundoff of each dtype. tf32 is cut off, not rounded, unless more is requested."""
SMALLEST = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149}
"""Smallest positive number of the dtype: an output below it rounds to it or to zero."""
FLUSHED = 2.0**-110
"""Bound of a sum of 2^16 numbers below 2^-126, which GPU kernels flush to zero."""
FLOAT32 = 2.0**-24
"""Unit roundoff of the float32 sums of every kernel."""


def rounding(sizes: torch.Tensor, dtype: str) -> torch.Tensor:
    """Largest error of numbers of these sizes (not negative) when they are rounded to the dtype. The error shrinks with
    the number down to the smallest normal number. Below that it is half the spacing: 2^-25 in fp16, whose smallest
    normal number is 2^-14.
    """
    return (UNIT_ROUNDOFF[dtype] * sizes).clamp(min=SMALLEST[dtype] / 2)


def row_limit(limit: torch.Tensor, dtype: str, alike: bool = False) -> torch.Tensor:
    """[L, T, Hq] float64: the largest allowed norm of (out - ref) over one row of one head. ``limit``: of its elements.

    Rounding errors of different channels are not aligned, so the norm of a row gets half the limits of its elements,
    except for channels that are ``alike``: all of them round the same way at each step (XQA in fp16: 0.79 of each
    element's limit, in every channel of a row).
    """
    norm: torch.Tensor = torch.linalg.vector_norm(limit, dim=-1)
    # Values that are flushed to zero are flushed in all channels alike.
    flushed: float = FLUSHED * limit.shape[-1] ** 0.5
    return norm / (1 if alike else 2) + (2 * SMALLEST[dtype] + flushed)


def linear_limit(
    limit: torch.Tensor, value: torch.Tensor, sizes: torch.Tensor, terms: torch.Tensor | None = None
) -> torch.Tensor:
    """Carry a limit through ``value @ W`` in float32: |W| times the limit, plus the error of the product's sums.

    ``limit`` and ``value`` [..., T, K], ``sizes`` [..., K, N]: |W|; all float64 -> [..., T, N] float64. ``terms`` [...,
    1, 1]: number of the K values in each sum; None: all.
    """
    own = ((value.shape[-1] if terms is None else terms) + 2) * FLOAT32
    return value.abs().mul_(own).add_(limit) @ sizes
