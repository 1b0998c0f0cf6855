"""Reading a KV pool by slots, for both healthy parents."""

from __future__ import annotations

import torch


def read_slots(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``buffer[slots]`` in float32: [*slots.shape, H, D] from [num_slots, H, D] and int64 slots.

    Indexing is not implemented for FP8 on every device, so its bytes are gathered.
    """
    return read_at(buffer, (slots,))


def read_at(buffer: torch.Tensor, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``buffer[at]`` in float32, for indices of its first dimensions."""
    if buffer.dtype.itemsize > 1:
        return buffer[at].float()
    return buffer.view(torch.uint8)[at].view(buffer.dtype).float()
