"""Another order of a sum, which changes the bits on every processor and nothing else about the result."""

from __future__ import annotations

import torch

_SMALL = 1 / 8
"""Largest fraction of a row's maximum up to which a value may be one step off without affecting the norm of the row's
errors."""


def in_other_order(out: torch.Tensor, other: torch.Tensor | bool) -> torch.Tensor:
    """``out`` as a sum of addends from the first to the last, and where ``other`` is true, from the last to the first.

    With real data another order changes few last bits, and on some processors none of a 16-bit result. So the addends
    are 1 and twice a quarter of its last bit, negative (in bf16: 1, -2^-9, -2^-9), in the dtype of ``out``, and their
    sum is a factor. From the first on, each quarter is halfway to the number before 1, and IEEE 754 rounds to 1, which
    is even. From the last on, the quarters add up to half a last bit, and the sum is the number before 1. As a factor
    it turns each normal number into the next one towards zero. It is applied only to the small values of a row: every
    row of drawn data has some, on every processor. ``other`` is broadcast to ``out``.
    """
    one = torch.ones((), dtype=out.dtype, device=out.device)
    quarter = torch.full_like(one, -torch.finfo(out.dtype).eps / 4)
    forwards, backwards = one + quarter + quarter, quarter + quarter + one
    size = out.abs()
    small = size <= size.amax(-1, keepdim=True) * _SMALL
    return out * torch.where(small & other, backwards, forwards)
