"""Normal numbers from a bank that numpy makes once; they have the same bits on every machine."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

BANK_SIZE = 1 << 20
_STRIDE = 7


@lru_cache(maxsize=1)
def _bank() -> torch.Tensor:
    numbers = np.random.default_rng(20260101).standard_normal(2 * BANK_SIZE, dtype=np.float32)
    return torch.from_numpy(numbers)


@lru_cache(maxsize=1)
def _strided_bank() -> torch.Tensor:
    bank = _bank()
    return bank[torch.arange(bank.numel()) * _STRIDE % bank.numel()]


def normals(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Float32 unit normals. Reading a shared bank costs a tenth of drawing them."""
    count, bank = math.prod(shape), _bank()
    start = int(rng.integers(0, BANK_SIZE))
    if count > BANK_SIZE:
        # Every seventh number from ``start`` on, cyclically: a piece of the strided bank.
        at = start * pow(_STRIDE, -1, bank.numel()) % bank.numel()
        if at + count <= bank.numel():
            return _strided_bank()[at : at + count].view(shape)
        # A round of an odd length: of 2^21 numbers, keys that are 2^16 apart would be equal, and an index that lost its
        # upper bits would read the right numbers.
        strided = _strided_bank()[:-1]
        at %= strided.numel()
        return strided.repeat(-(-(at + count) // strided.numel()))[at : at + count].view(shape)
    return bank[start : start + count].view(shape)
