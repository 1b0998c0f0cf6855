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
        at, strided = start * pow(_STRIDE, -1, bank.numel()) % bank.numel(), _strided_bank()
        if at + count > strided.numel():
            # A round of an odd length: of 2^21 numbers, keys that are 2^16 apart would be equal, and an index that lost
            # its upper bits would read the right numbers.
            strided = strided[:-1]
            first = strided[at % strided.numel() :]
            rounds, last = divmod(max(0, count - first.numel()), strided.numel())
            at, strided = 0, torch.cat([first, *[strided] * rounds, strided[:last]])
        return strided[at : at + count].view(shape)
    return bank[start : start + count].view(shape)
