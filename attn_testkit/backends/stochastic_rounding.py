"""Stochastic rounding in plain torch, with other random numbers in each replay of a graph."""

from __future__ import annotations

import torch

_BITS = {torch.float16: (11, -14), torch.bfloat16: (8, -126)}
"""Dtype -> bits of a significand, and exponent of the smallest normal number."""
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
"""Shifts and factors of the SplitMix64 finalizer, as signed integers."""


class StochasticRounding:
    """Rounds float32 numbers to the number below or above, with probabilities by distance.

    The seed is a tensor on the device that each call increments, so it advances in replays, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.calls = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``values`` of any shape, rounded to ``dtype``: fp16 or bf16."""
        bits, smallest = _BITS[dtype]
        self.calls.add_(1)
        exponent = torch.frexp(values)[1].clamp(min=smallest + 1)
        unit = torch.ldexp(torch.ones_like(values), exponent - bits)
        low = torch.floor(values / unit)
        up = self.uniform(values) < values / unit - low
        return ((low + up) * unit).to(dtype)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Random numbers in [0, 1) in float32, one for each element of ``like``."""
        mixed = torch.arange(like.numel(), device=like.device) + self.calls * (1 << 32)
        for shift, factor in _MIX:
            mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return (((mixed >> 32) & 0xFFFFFF).float() * 2.0**-24).view_as(like)
