"""Another order of a sum, whose bits are other ones on every processor. Nothing else about the result is wrong."""

from __future__ import annotations

import torch

_SMALL = 1 / 8
"""A number of at most so much of its row's largest may be one step off: the norm of the row's errors stays right."""


def in_other_order(out: torch.Tensor, other: torch.Tensor | bool) -> torch.Tensor:
    """``out`` as its addends give it from the first to the last, and where ``other``, from the last to the first.

    Another order of real data changes few last bits, and on some processors none of those that 16 bits hold. So the
    addends are 1 and twice a quarter of its last bit, negative (in bf16: 1, -2^-9, -2^-9), in the dtype of ``out``,
    and their sum is a factor. From the first, each quarter lies halfway to the number before 1, and IEEE 754 rounds
    it to 1, which is even. From the last, the quarters are half a last bit by then, and the sum is the number before 1.
    As a factor it turns each normal number into the next one towards zero. Only the small numbers of a row have it:
    there are some in every row of drawn numbers, which no processor decides. ``other`` is broadcast to ``out``.
    """
    one = torch.ones((), dtype=out.dtype, device=out.device)
    quarter = torch.full_like(one, -torch.finfo(out.dtype).eps / 4)
    forwards, backwards = one + quarter + quarter, quarter + quarter + one
    size = out.abs()
    small = size <= size.amax(-1, keepdim=True) * _SMALL
    return out * torch.where(small & other, backwards, forwards)
