"""The NaN in unowned slots of states, whose bits any arithmetic changes.

A CPU's arithmetic keeps the bits of a quiet NaN, such as 0xFFFFFFFF. So with a quiet NaN, a padded request that updates
the state of slot 0 in place would be noticed only on a GPU, like a dummy run of vLLM's linear attention. Copies keep
the bits.
"""

from __future__ import annotations

import torch

_BITS = {
    torch.float32: (torch.int32, 0xFFBFFFFF - (1 << 32)),
    torch.bfloat16: (torch.int16, 0xFFBF - (1 << 16)),
    torch.float16: (torch.int16, 0xFDFF - (1 << 16)),
}
"""Dtype -> integers of its size, and a signaling NaN as such a number."""


def fill_with_signaling_nan(*tensors: torch.Tensor) -> None:
    """Fill tensors of any strides; float32, bfloat16 or float16."""
    for tensor in tensors:
        integer, bits = _BITS[tensor.dtype]
        tensor.view(integer).fill_(bits)
